"""Answers that are compared as text: letters of options, words, JSON, regular expressions and tool calls."""
