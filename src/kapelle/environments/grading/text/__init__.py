"""Answers compared as text: letters, words, JSON, patterns, calls of tools."""
