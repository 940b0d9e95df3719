"""Rows of data sets: where they are, how they are read, which are usable."""
