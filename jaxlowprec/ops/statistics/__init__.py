"""What quantisation did to an array, counted."""
