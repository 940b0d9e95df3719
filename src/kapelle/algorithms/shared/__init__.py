"""Settings and functions that several algorithms share."""
