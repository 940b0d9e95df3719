"""Servers that make parts of a process available to other processes over the network."""
