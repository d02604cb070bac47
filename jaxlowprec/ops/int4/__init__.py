"""4-bit integers with a scale per block."""
