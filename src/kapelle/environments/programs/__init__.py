"""Processes of outside programs: one for each episode, started by a command or forked from a process with all imports."""
