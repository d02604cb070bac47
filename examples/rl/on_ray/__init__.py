"""Trainer and rollout workers as actors of Ray, which restarts those that die; used by rl_loop.py --engine ray."""
