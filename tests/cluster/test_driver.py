"""How the driver reacts to the ends of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kapelle.cluster import launcher
from kapelle.cluster.actors import ActorCall, ActorLost
from kapelle.cluster.launcher import SHARED
from kapelle.errors import ConfigError
from kapelle.runtime.machine import versions_of


class Said(ActorCall):
    def __init__(self, value: Any) -> None:
        self.value = value

    def answer(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Host:
    """An actor of a rank with scripted events."""

    def __init__(self, *news: Any) -> None:
        self.news = list(news)
        self.ended = False
        self.signals: list[int] = []

    def call(self, method: str, *given: Any) -> Said:
        if method == "signal":
            self.signals.append(given[0])
            return Said(None)
        return Said(self.news.pop(0) if self.news else ([], None))

    def end(self) -> None:
        self.ended = True


def follow(monkeypatch: pytest.MonkeyPatch, *hosts: Host) -> int:
    turn = itertools.count()
    monkeypatch.setattr(launcher, "first_answered", lambda request, _: request[next(turn) % len(request)])
    ranks = [launcher._Rank(number, host, Said(None)) for number, host in enumerate(hosts)]  # type: ignore[arg-type]
    return launcher.follow(ranks)


def test_the_output_of_ranks_is_printed(monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> None:
    cut = "7²".encode()
    host = Host(([("out", cut[:2])], None), ([("out", cut[2:]), ("err", b"note\n")], None), ([], 0))
    assert follow(monkeypatch, host) == 0
    assert capfdbinary.readouterr() == (cut, b"note\n")


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ([([], 2), ([], 2)], 2, ""),
        ([([], 130), ([], 0)], 130, ""),
        ([([], -9), ([], 2)], 2, "kapelle: Rank 0 was killed by signal 9."),
        ([([], 2), ActorLost("node gone")], 2, "kapelle: The actor of rank 1 died: node gone."),
    ],
)
def test_the_exit_code_is_the_first_one_and_the_killed_rank_is_named(
    ends: list[Any], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(monkeypatch, *map(Host, ends)) == code
    assert capsys.readouterr().err.startswith(said)


def test_a_rank_that_does_not_end_after_another_has_failed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LAST_WORDS", 0.05)
    hangs = Host()
    assert follow(monkeypatch, hangs, Host(([], 2))) == 2
    assert hangs.ended


def test_signals_are_forwarded_to_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Host(([], None), ([], 143)), Host(([], None), ([], 143))
    monkeypatch.setattr(launcher, "_signals", [15])
    assert follow(monkeypatch, *hosts) == 143
    assert [host.signals for host in hosts] == [[15], [15]]


def test_another_version_is_an_error_with_its_name() -> None:
    here = versions_of(SHARED)
    launcher.check_versions([{"versions": here, "host": "a"}])
    with pytest.raises(ConfigError, match=r"rank 1 \(10.0.0.2\) has ray 1.0"):
        launcher.check_versions(
            [{"versions": here, "host": "a"}, {"versions": {**here, "ray": "1.0"}, "host": "10.0.0.2"}]
        )
