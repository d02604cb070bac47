"""Files and folders of checkpoints: read with every check, written whole."""
