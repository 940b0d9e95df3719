"""A league: a pool of opponents or partners, how they are drawn, and which roles they take.

The league itself does not hold models.
"""
