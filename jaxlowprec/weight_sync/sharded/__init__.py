"""Weights whose arrays lie in several processes: each process sends its own shards, the receiver joins them."""
