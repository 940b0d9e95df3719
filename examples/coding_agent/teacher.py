"""Demonstrations for untrained tiny models: commands, only some of which solve a task."""

import random
from collections.abc import Sequence

from kapelle.types import Message, Task

COMMANDS = (
    "echo hello > greeting.txt",
    "sort -u names.txt > sorted.txt",
    "echo 'def mean(n): return sum(n) / max(len(n), 1)' > statistics_of.py",
    "ls",
)


def say(agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
    """Return a random command, and after its result a final message."""
    if messages[-1].content.startswith("(exit code"):
        return "Done."
    return f"```bash\n{random.Random(f'{seed} {task.id}').choice(COMMANDS)}\n```"
