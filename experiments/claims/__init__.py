"""One file for each claim, whose `CLAIM` says all of it."""
