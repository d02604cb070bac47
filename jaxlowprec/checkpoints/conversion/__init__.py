"""Whole checkpoints: converted, decoded again, inspected."""
