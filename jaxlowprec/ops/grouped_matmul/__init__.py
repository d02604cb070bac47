"""Products of rows in groups, each group with a weight of its own: a mixture of experts."""
