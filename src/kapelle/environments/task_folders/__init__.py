"""Task folders in the formats of Harbor and terminal-bench; the folder's tests give the reward."""
