"""What a layer quantises, and how: roles, the recipes, and the context that a layer takes its recipe from."""
