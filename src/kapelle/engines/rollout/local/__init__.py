"""The rollout engine of this process: it decodes the requests of all agents in one batch."""
