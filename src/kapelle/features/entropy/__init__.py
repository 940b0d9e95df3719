"""An entropy bonus for some agents, annealed over the run: roles explore for as long as each needs to."""
