"""Tests of `jaxlowprec.rl`."""
