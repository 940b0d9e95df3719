"""Worlds in processes of their own: a pool of workers, and what is said between them and this process."""
