"""Plain tools of a process: seeds, random generators, event loops, bounded requests, durable files."""
