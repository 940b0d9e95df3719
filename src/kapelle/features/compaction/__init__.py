"""Compaction: shorten a conversation that no longer fits in the context to its first and last messages."""
