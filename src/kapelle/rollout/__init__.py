"""Playing episodes: tasks in, groups of episodes out."""
