"""The agents' demonstrations: the embedded model is untrained, and learns the format from them.

Agents that prepare the answer name the item. The clerk, which answers, is polite in one of three replies, so that something
remains to be learned from rewards.
"""

import random
import re
from collections.abc import Sequence

from kapelle.types import Message, Task


def say(agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
    """Return an agent's answer to the order that it reads."""
    [item] = re.findall(r"^Order: (\w+)", messages[-1].content, re.MULTILINE)[-1:]
    if agent != "clerk":
        return f"{item}"
    return f"{item} sent{random.Random(seed).choice(['.', '.', ', thanks.'])}"
