"""The trainer's side: the tensors of a version, the buckets that they are sent in, and the session."""
