"""Servers: what runs in one process, offered to others over the wire."""
