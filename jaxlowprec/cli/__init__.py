"""The `jaxlowprec` command."""
