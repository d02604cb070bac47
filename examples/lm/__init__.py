"""A byte-level language model, its data, its training loop and its report; used by train_lm.py."""
