"""An entropy bonus for individual agents, which is annealed over the run, so that each role explores as long as necessary."""
