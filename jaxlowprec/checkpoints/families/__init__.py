"""Model families: the tensor names and layouts of each in Hugging Face's checkpoints, and in the trees of trainers."""
