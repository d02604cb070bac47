"""What a compiled program does on its devices."""
