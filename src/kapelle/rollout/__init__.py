"""Roll out episodes for tasks, and collect them in groups."""
