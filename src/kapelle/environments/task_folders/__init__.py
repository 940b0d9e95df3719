"""Task folders in the forms of Harbor and terminal-bench, with the folder's tests as reward."""
