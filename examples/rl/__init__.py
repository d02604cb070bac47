"""A policy, its task, GRPO, and the rollout in a process of its own; used by rl_loop.py and rl_ray.py."""
