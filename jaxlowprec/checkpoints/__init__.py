"""Quantised checkpoints: published formats, safetensors files, conversion and inspection."""
