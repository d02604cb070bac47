"""Activations, plain and gated, and their derivatives."""
