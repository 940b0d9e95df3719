"""Builds a team and its models from a recipe. All settings are checked before a model is loaded."""
