"""The process that speaks to Ray for a run: it places actors, starts the ranks, and shows what they print.

`launcher.py` starts it and ends what it may leave.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kapelle.cluster.actors import Actor, ActorLost, Asked, Connection, first_answered
from kapelle.cluster.placement import Placement, lay_out
from kapelle.cluster.ranks import SHARED, RankHost
from kapelle.errors import ConfigError, EngineError, KapelleError
from kapelle.runtime.characters import cleaned
from kapelle.runtime.credentials import without_secrets
from kapelle.runtime.machine import versions_of
from kapelle.runtime.process_tree import end_session, end_with_stdin
from kapelle.settings.schema import RayConfig

EXIT_WRONG = 2
LOOK = 0.2
"""Seconds between two looks at whether a signal has arrived."""
LAST_WORDS = 60.0
"""Seconds that ranks have to end once another one has failed."""

_signals: list[int] = []
"""Those that have arrived and are not passed on."""


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    host: Actor
    about: Asked
    news: Asked | None = None
    code: int | None = None
    """Its exit code; negative where a signal ended it."""
    told: list[str] = field(default_factory=list)


def main() -> None:
    """Run what the first argument says (see `launcher.launch`) and end this process with the run's exit code."""
    order = json.loads(sys.argv[1])
    folder = Path(order["folder"])
    session = os.getsid(0)
    end_with_stdin(lambda: end_session(session))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _note)
    try:
        code = _run(order, folder)
    except KapelleError as error:
        _complain(str(error))
        code = EXIT_WRONG
    except _Stopped as stopped:
        code = 128 + stopped.args[0]
    except Exception:  # noqa: BLE001 - a defect, or what Ray raises of its own
        print(cleaned(traceback.format_exc()), file=sys.stderr)  # noqa: T201
        code = EXIT_WRONG
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _Stopped(Exception):
    """A signal has arrived before the ranks have started."""


def _note(number: int, _frame: FrameType | None) -> None:
    _signals.append(number)


def _complain(reason: str) -> None:
    print(cleaned(f"kapelle: {' '.join(without_secrets(reason).split())}"), file=sys.stderr, flush=True)  # noqa: T201 - for the command


def _run(order: dict[str, Any], folder: Path) -> int:
    config = RayConfig.model_validate(order["ray"])
    count = int(order["processes"])
    own = config.address is None
    connection = Connection.start(folder) if config.address is None else Connection.join(config.address)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ray has set its own
        signal.signal(number, _note)
    try:
        bundles, places = lay_out(config, count, int(order["worlds"]))
        name = f"kapelle-{secrets.token_hex(8)}"
        connection.place(name, bundles, spread=config.spread, seconds=config.timeout, grows=not own)
        hosts = [connection.actor(RankHost, bundle, config.trainer) for bundle in range(count)]
        ranks = [_Rank(number, host, host.ask("about")) for number, host in enumerate(hosts)]
        where = [_answer_within(rank, config.timeout) for rank in ranks]
        _check_versions(where)
        first = {
            "MASTER_ADDR": where[0]["host"],
            "MASTER_PORT": str(where[0]["port"]),
            "WORLD_SIZE": str(count),
        }
        for rank, place in zip(ranks, places, strict=True):
            placed = Placement(connection.address, connection.namespace, name, place)
            # Of the machine's GPUs a rank sees its own alone.
            seat = {"RANK": str(rank.number), "LOCAL_RANK": "0", **first, **placed.variable()}
            rank.host.ask("start", order["words"], seat, order["cwd"], order["path"]).answer()
        return _follow(ranks)
    except ActorLost as lost:
        raise EngineError(f"An actor was lost while the run was started: {lost}") from None
    finally:
        connection.leave()


def _answer_within(rank: _Rank, seconds: float) -> dict[str, Any]:
    """Return what a rank's actor says of itself; ConfigError where it cannot start."""
    until = time.monotonic() + seconds
    while first_answered([rank.about], LOOK) is None:
        if _signals:
            raise _Stopped(_signals[0])
        if time.monotonic() > until:
            raise EngineError(
                f"The actor of rank {rank.number} has not started within {seconds:g} s. Look whether its machine is there, or wait "
                "longer (`ray.timeout`)."
            )
    try:
        answer: dict[str, Any] = json.loads(rank.about.answer())
    except ActorLost as lost:
        raise ConfigError(
            f"The actor of rank {rank.number} cannot start: {lost}. Install the same kapelle, with its extra `ray`, on every machine."
        ) from None
    return answer


def _check_versions(where: list[dict[str, Any]]) -> None:
    here = versions_of(SHARED)
    for rank, said in enumerate(where):
        for package, found in said["versions"].items():
            if found != here[package]:
                raise ConfigError(
                    f"The machine of rank {rank} ({said['host']}) has {package} {found}, this one {here[package]}. Install the same "
                    "versions on every machine."
                )


def _follow(ranks: list[_Rank]) -> int:
    """Show what the ranks print until all have ended; return the exit code of the one that failed first."""
    for rank in ranks:
        rank.news = rank.host.ask("news")
    failed: _Rank | None = None
    until = float("inf")
    while running := [rank for rank in ranks if rank.code is None]:
        while _signals:
            number = _signals.pop(0)
            for rank in running:
                rank.host.ask("signal", number)
        first = first_answered([rank.news for rank in running if rank.news is not None], LOOK)
        for rank in running:
            if first is not None and rank.news is first:
                _take(rank)
                if rank.code and failed is None:
                    failed, until = rank, time.monotonic() + LAST_WORDS
        if time.monotonic() > until:
            for rank in running:
                rank.host.end()
            break
    if failed is None:
        return 0
    # One that was killed is the cause; others that end with its name come after it.
    killed = next((rank for rank in ranks if rank.code is not None and rank.code < 0), None)
    if killed is not None and killed.told:
        _complain(
            f"{killed.told[0]} Resume the run: nothing is lost but the steps since its last checkpoint."
        )
    code = failed.code or 0
    return EXIT_WRONG if code < 0 and killed is not None and killed.told else 128 - code if code < 0 else code


def _take(rank: _Rank) -> None:
    """Print what a rank has printed, and note how it ended."""
    assert rank.news is not None
    try:
        printed, rank.code = rank.news.answer()
    except ActorLost as lost:
        rank.code = -int(signal.SIGKILL)
        rank.told.append(f"The actor of rank {rank.number} died: {lost}.")
        return
    for name, data in printed:
        stream = sys.stdout.buffer if name == "out" else sys.stderr.buffer
        stream.write(data)
        stream.flush()
    if rank.code is None:
        rank.news = rank.host.ask("news")
    elif rank.code < 0:
        rank.told.append(f"Rank {rank.number} was killed by signal {-rank.code}.")
