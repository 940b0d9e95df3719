"""A trained reward model in addition to the environment's rewards, and verifiers that continue training on graded answers."""
