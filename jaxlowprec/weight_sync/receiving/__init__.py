"""The engine's side: what was received, in which form, and when it is served."""
