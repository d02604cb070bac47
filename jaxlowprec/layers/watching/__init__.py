"""What layers do within blocks that watch or steer them: telemetry, `debug`, `find_policy`, `accumulate_gradients`."""
