"""What siiRL's own `process.py` does: an empty system message before what a node reads, and what it hands on.

The template of what a node reads is `Node.prompt`.
"""

from __future__ import annotations


def pre_process(prompt: str) -> list[dict[str, str]]:
    """Return the conversation that the node reads: an empty system message keeps templates from writing their own."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]


def post_process(prompt: str, response: str, *, post_chat_template: str = "") -> str:
    """Return prompt, template and response as one text."""
    return f"{prompt}{post_chat_template}{response}"
