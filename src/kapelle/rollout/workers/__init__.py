"""Run episode states in separate processes, with a pool of workers that exchange messages with this process."""
