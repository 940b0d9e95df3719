"""Episode states in processes of their own: a pool of workers, and the messages between them and this process."""
