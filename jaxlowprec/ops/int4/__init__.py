"""4-bit integers with a scale a group."""
