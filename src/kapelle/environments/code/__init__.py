"""Programming problems."""
