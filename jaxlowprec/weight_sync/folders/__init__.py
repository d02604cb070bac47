"""By a shared folder of versions, complete or as changes."""
