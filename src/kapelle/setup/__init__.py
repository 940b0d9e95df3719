"""From a recipe to a team and its models, everything checked before a model is loaded."""
