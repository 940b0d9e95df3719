"""A trained reward model in addition to the environment's rewards, and verifiers that train further on graded answers."""
