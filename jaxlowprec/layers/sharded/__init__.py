"""Quantised arrays and kernels that are split over devices, for use inside `jax.shard_map`."""
