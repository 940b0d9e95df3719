"""Data sets that functions of yours pay for."""
