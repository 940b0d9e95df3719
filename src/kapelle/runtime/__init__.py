"""General tools for processes, such as seeds, random generators, event loops, HTTP requests with limits, and crash-safe files."""
