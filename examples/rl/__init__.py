"""A policy, its task, GRPO, and the rollout in a process of its own: the parts of rl_loop.py."""
