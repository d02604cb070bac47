"""A function's matrix products by parameters: found in its jaxpr, and computed under recipes."""
