"""Rows of data sets: where they are, how they are read, and which rows are usable."""
