"""What a compiled program does."""
