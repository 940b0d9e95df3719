"""What agents say in demonstrations: the embedded model has never spoken, and learns from this how.

Whoever prepares names the item. The clerk, who answers, is polite in one of three replies: rewards have to teach the rest.
"""

import random
import re
from collections.abc import Sequence

from kapelle.types import Message, Task


def say(agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
    """Return what an agent answers to the order that it reads."""
    [item] = re.findall(r"^Order: (\w+)", messages[-1].content, re.MULTILINE)[-1:]
    if agent != "clerk":
        return f"{item}"
    return f"{item} sent{random.Random(seed).choice(['.', '.', ', thanks.'])}"
