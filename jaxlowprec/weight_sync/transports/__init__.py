"""Transports between trainer and engine: TCP, shared memory, or calls in one process."""
