"""What layers do within blocks that watch them: telemetry, `debug` and `find_policy`."""
