"""Recipes for whole models: transformations, explanations, searches and a decoder."""
