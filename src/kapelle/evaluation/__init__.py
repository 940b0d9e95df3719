"""How good a team is, and against what."""
