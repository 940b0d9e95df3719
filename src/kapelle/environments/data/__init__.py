"""Modules that find and read the rows of data sets and decide which rows are usable."""
