"""Episode states in separate processes: a pool of workers, and the messages between them and this process."""
