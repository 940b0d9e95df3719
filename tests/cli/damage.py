"""What happens to files, and what a command says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Said

Damage = Callable[[], object]


def bytes_in(path: str, data: bytes) -> Damage:
    def damage() -> None:
        Path(path).write_bytes(data)

    return damage


def cut(path: str, share: float = 0.5) -> Damage:
    def damage() -> None:
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: int(len(whole) * share)])

    return damage


def folder_at(path: str) -> Damage:
    def damage() -> None:
        Path(path).unlink(missing_ok=True)
        Path(path).mkdir(parents=True)

    return damage


def gone(path: str) -> Damage:
    return lambda: Path(path).unlink()


def one_line(said: Said) -> bool:
    return said.err.startswith("kapelle: ") and said.err.count("\n") == 1 and "Traceback" not in said.err
