"""Products with quantised operands and their three GEMMs, which the layers of every framework call."""
