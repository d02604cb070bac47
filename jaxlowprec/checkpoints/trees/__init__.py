"""Parameter trees, and the names and tensors of their leaves in checkpoints."""
