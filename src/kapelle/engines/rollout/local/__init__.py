"""The rollout engine of this process: one decode batch for the requests of all agents."""
