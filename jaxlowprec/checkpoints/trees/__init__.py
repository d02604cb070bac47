"""Parameter trees, and the names and tensors under which checkpoints have them."""
