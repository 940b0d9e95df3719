"""From a recipe to a team and its models; everything is checked before a model is loaded."""
