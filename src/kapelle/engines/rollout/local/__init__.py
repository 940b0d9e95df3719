"""The local rollout engine, which decodes the requests of all agents in one batch, in the trainer's process."""
