"""Settings: the base of every configurable piece, the schema of a run, and the messages for invalid settings."""
