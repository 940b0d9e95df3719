"""What siiRL's own `process.py` hands on: what a node was handed, a template, and what the node said.

Its other half, the template of what a node reads, is `Node.prompt`.
"""

from __future__ import annotations


def post_process(prompt: str, response: str, *, post_chat_template: str = "") -> str:
    """Return prompt, template and response as one text."""
    return f"{prompt}{post_chat_template}{response}"
