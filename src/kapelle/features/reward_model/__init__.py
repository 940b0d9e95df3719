"""A trained reward model beside the environment's rewards, and verifiers that are trained further on graded answers of the team."""
