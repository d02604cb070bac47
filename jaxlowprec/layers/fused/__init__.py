"""Linears with what is around them: several that read one input, and the MLP."""
