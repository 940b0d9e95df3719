"""Whether somebody waits for a page: what works in the background lets them go first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Traffic:
    """Counts the calls that are being answered; those that stay open to be told news do not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def busy(self) -> bool:
        """Whether a page is being made."""
        return self._calls > 0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a call while it is being answered."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count a call while it waits for what works in the background."""
        with self._lock:
            self._calls -= 1
        try:
            yield
        finally:
            with self._lock:
                self._calls += 1
