"""An entropy bonus for some agents, annealed over the run, so that each role explores for as long as it needs to."""
