"""Processes of external programs, one per episode, which are started by a command or forked from a process with all imports done."""
