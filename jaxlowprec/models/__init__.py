"""What a recipe does to a whole model."""
