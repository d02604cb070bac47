"""Dequantise."""
