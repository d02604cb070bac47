"""Quantise."""
