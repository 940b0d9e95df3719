"""The arguments of `kapelle serve` and `kapelle chat`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

CALLS, SECONDS, BATCH = 1024, 600.0, 64
"""Answers under way at once, the seconds that one may take, and the answers scored together, unless set otherwise."""

WORLD_IDLE, SESSION_IDLE = 600.0, 3600.0
"""Seconds without a call after which a world, or a session without a reward, may be closed, unless set otherwise."""


def declare_serve(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="(policy | reward) RUN | environments",
        help="what to serve, and the run directory it comes from; for environments their settings, name.key=value",
    )
    parser.add_argument(
        "--record",
        metavar="FOLDER",
        help="keep what programs do with the agents, as episodes, once they post a reward",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="what clients call the team or the verifier (the run's name)"
    )
    _declare_environments(parser)
    declare_binding(parser, 8000, environments=50_051)
    parser.add_argument(
        "--grpc-port",
        type=int,
        metavar="PORT",
        help="reward: port for gRPC beside HTTP; 0 takes a free one (no gRPC)",
    )
    parser.add_argument(
        "--calls",
        type=_positive(int),
        default=CALLS,
        metavar="N",
        help=f"most answers under way at once, those that wait included ({CALLS})",
    )
    parser.add_argument(
        "--batch",
        type=_positive(int),
        default=BATCH,
        metavar="N",
        help=f"reward: most answers that are scored together ({BATCH})",
    )
    parser.add_argument(
        "--timeout",
        type=_positive(float),
        default=SECONDS,
        metavar="S",
        help=f"seconds that one call may take ({SECONDS:g})",
    )


def _declare_environments(parser: argparse.ArgumentParser) -> None:
    """Add what environments alone are served with."""
    parser.add_argument(
        "--environments",
        metavar="NAMES",
        help="environments: what to serve, as name or name=what, separated by commas",
    )
    parser.add_argument(
        "--workers",
        type=_from_zero,
        default=0,
        metavar="N",
        help="environments: processes for their worlds; 0 keeps them in one (0)",
    )
    parser.add_argument(
        "--sessions",
        type=_positive(int),
        default=4096,
        metavar="N",
        help="environments: most worlds at once (4096)",
    )
    parser.add_argument(
        "--idle",
        type=_positive(float),
        metavar="S",
        help="seconds after which what nobody calls any more may be closed: worlds of environments "
        f"({WORLD_IDLE:g}), sessions that are recorded ({SESSION_IDLE:g})",
    )
    parser.add_argument(
        "--drain",
        type=_positive(float),
        default=30.0,
        metavar="S",
        help="environments: seconds after a signal in which episodes may end (30)",
    )
    parser.add_argument(
        "--replace", metavar="NAMES", help="environments: put these on the server at --at, while runs play"
    )
    parser.add_argument("--at", metavar="HOST:PORT", help="environments: the server of --replace")
    parser.add_argument(
        "--certificate", metavar="FILE", help="environments: PEM file that the server of --at is trusted by"
    )


def declare_binding(parser: argparse.ArgumentParser, port: int, **others: int) -> None:
    """Add where a service listens and who may call it; `port` is the usual one, and with `others` the command knows it."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="HOST", help="address to listen on (127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=None if others else port,
        metavar="PORT",
        help=f"port to listen on; 0 takes a free one ({'; '.join([str(port), *(f'{k} {v}' for k, v in others.items())])})",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM file of the TLS certificate, with its chain")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file of its key")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name by which callers address this service; may be given several times",
    )


def declare_chat(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kapelle chat`."""
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run directory")
    parser.add_argument("--agent", metavar="NAME", help="talk with one agent alone (the whole team)")


def _from_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 0")
    return int(text)


def _positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is no number") from None
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not more than 0")
        return number

    return read
