"""The web viewer of runs: curves, conversations and credit, read from run directories alone; needs no torch."""
