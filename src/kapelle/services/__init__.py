"""Servers that make parts of one process available to other processes over the network."""
