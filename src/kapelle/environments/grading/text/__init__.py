"""Graders that compare answers as strings: letters of options, words, JSON, regular expressions and tool calls."""
