"""Between processes: TCP, shared memory, or a call."""
