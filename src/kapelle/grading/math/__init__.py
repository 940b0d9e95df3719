"""Mathematical answers."""
