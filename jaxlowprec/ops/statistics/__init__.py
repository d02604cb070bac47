"""Statistics of the error that quantisation makes in an array."""
