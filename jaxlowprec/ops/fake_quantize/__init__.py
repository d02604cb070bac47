"""Fake-quantise."""
