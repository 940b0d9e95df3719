"""Numbers about a step: what is counted, how sure it is, where the time went."""
