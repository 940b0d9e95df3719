"""The run directory, which is the interface between programs.

This package defines what is written, how to read it, and who may write to it.
"""
