"""The engine's side: receives versions of the weights, in one of several forms, and serves them."""
