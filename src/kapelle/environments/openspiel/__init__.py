"""Environments for games of OpenSpiel (arXiv:1908.09453)."""
