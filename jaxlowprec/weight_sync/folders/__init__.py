"""Sync through a shared folder of versions, which are complete or changes."""
