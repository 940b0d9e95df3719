"""Compaction: a conversation that no longer fits the context continues from its first and last messages."""
