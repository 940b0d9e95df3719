"""Numbers about a step: what is counted, how certain it is, where the time went."""
