"""A league: a pool of opponents or partners, which of them are drawn, and which roles they play. It holds no models."""
