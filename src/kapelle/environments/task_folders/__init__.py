"""Task folders in the forms of Harbor and terminal-bench: a program is asked for, and the folder's tests pay for it."""
