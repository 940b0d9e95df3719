"""The web viewer of runs, which shows curves, conversations and credit. The viewer reads only run directories and does not need torch."""
