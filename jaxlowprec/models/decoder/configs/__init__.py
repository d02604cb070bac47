"""How the config.json of each family says what a decoder is."""
