"""A league: a pool of opponents or partners, how they are drawn, and which roles they play. It does not hold models."""
