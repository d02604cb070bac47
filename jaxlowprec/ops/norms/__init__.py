"""Norms of rows, with a residual that is added before, and their derivatives."""
