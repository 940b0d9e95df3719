"""Train engines: whoever holds the learning weights, behind one protocol."""
