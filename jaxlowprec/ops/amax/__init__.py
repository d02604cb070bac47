"""Tensor amax."""
