"""Recipes: what a layer quantises and how, and the context that a layer takes its recipe from."""
