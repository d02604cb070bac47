"""Trainer to rollout engine: new versions of the weights while the engine serves the old one."""
