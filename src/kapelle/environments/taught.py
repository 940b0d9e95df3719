"""Demonstrations that are written by a user's function, for third-party environments without a script.

environment: {name: openenv, url: "http://127.0.0.1:8000", teacher: "teacher.py:say"}
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from kapelle.environment import Teachable
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.plugins import find_object
from kapelle.settings.base import Settings
from kapelle.types import Message, Task


class WithTeacher(Settings, Teachable):
    """Settings of an environment for which the user can provide a function that writes demonstrations."""

    teacher: str | None = None
    """The function that answers for the agents in demonstrations (`warmup`, `sft`), written as `module:name` or `path/file.py:name`.
    The function is called as `teacher(agent, task, messages, seed)` and returns a string."""

    def check_teacher(self) -> None:
        """Raise ConfigError if the function in `teacher` is not found."""
        if self.teacher is not None:
            find_object(self.teacher, "teacher")

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the answer of the `teacher`. Raises EpisodeError if the answer is not a string."""
        assert self.teacher is not None, "an environment without a teacher offers no script"
        text = find_object(self.teacher, "teacher")(agent, task, messages, seed)
        if not isinstance(text, str):
            raise EpisodeError(
                f"`environment.teacher` returned {type(text).__name__} for '{agent}'. Return a string."
            )
        return text

    def teacher_hash(self) -> str | None:
        """Return a hash of the file that contains the `teacher`, without the files that it imports.

        Returns None if there is no `teacher` or its file cannot be read.
        """
        if self.teacher is None:
            return None
        module = self.teacher.rpartition(":")[0]
        try:
            find_object(self.teacher, "teacher")
            file = module if module.endswith(".py") else sys.modules[module].__file__ or ""
            return hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()
        except (ConfigError, OSError):  # `check_teacher` reports this error
            return None
