"""The arguments of `kapelle serve` and `kapelle chat`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

CALLS, SECONDS, BATCH = 1024, 600.0, 64
"""Answers under way at once, the seconds that one may take, and the answers scored together, unless set otherwise."""


def declare_serve(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="(policy | reward) RUN",
        help="what to serve, and the run directory it comes from",
    )
    parser.add_argument(
        "--record",
        metavar="FOLDER",
        help="keep what programs do with the agents, as episodes, once they post a reward",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="what clients call the team or the verifier (the run's name)"
    )
    declare_binding(parser, 8000)
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


def declare_binding(parser: argparse.ArgumentParser, port: int) -> None:
    """Add where a service listens and who may call it; `port` is the usual one."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="HOST", help="address to listen on (127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=port,
        metavar="PORT",
        help=f"port to listen on; 0 takes a free one ({port})",
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
