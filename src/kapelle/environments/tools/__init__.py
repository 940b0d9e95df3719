"""Tools that agents call, and the world in which they do."""
