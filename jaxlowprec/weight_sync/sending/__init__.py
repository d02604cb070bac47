"""The trainer's side: what is sent, in which pieces, in which session."""
