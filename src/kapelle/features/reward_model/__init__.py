"""A trained reward model in addition to the environment's rewards, and verifiers that are trained further on graded answers."""
