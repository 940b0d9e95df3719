"""The settings of a run: the base class of every configurable component, the schema of a run, and the messages for invalid settings."""
