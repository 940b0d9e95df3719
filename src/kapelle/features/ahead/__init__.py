"""Roll out episodes ahead of the update: with older weights, in another process, and in groups that a later step finishes."""
