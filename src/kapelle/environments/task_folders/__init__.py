"""Task folders in the formats of Harbor and terminal-bench, whose tests give the reward."""
