"""How good a team is, and compared with what."""
