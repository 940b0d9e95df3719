"""A league: a pool of opponents or partners, who of them is drawn, and who sits where. Plain data and functions, without models."""
