"""Runs of examples/rl_loop.py with other policies."""
