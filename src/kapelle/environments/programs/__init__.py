"""Processes of external programs: one per episode, started by a command or forked from a process that has done all imports."""
