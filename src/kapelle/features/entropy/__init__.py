"""An entropy bonus for some agents, annealed over the run: each role explores for as long as it needs to."""
