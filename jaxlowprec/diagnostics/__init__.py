"""Diagnostics: platforms that a recipe runs on, bytes between devices, and the first layer that goes wrong."""
