"""A byte-level language model, its data, its training loop and its report: the parts of train_lm.py."""
