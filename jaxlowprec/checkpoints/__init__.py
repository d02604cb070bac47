"""4-bit and 8-bit checkpoints as other programs write and read them."""
