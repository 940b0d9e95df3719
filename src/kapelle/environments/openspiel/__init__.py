"""Games of OpenSpiel (1908.09453)."""
