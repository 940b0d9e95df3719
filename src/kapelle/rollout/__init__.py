"""Rolling out episodes: from tasks to groups of episodes."""
