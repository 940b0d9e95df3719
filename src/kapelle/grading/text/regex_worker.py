"""The program in which regular expressions of data sets run: forked and killable."""

from __future__ import annotations

import re

from kapelle.grading.fork_server import serve
from kapelle.types import Json


def match(question: Json) -> Json:
    """Return whether the whole `text` matches `pattern`."""
    return re.fullmatch(question["pattern"], question["text"]) is not None


if __name__ == "__main__":
    serve(match)
