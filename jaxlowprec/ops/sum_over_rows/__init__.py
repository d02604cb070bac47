"""The sum over rows, in an order of its own."""
