"""Products with quantised operands and their three GEMMs: what layers of every framework call."""
