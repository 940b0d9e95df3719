"""Learned decompositions of a team's return: what VDN and QMIX share."""
