"""Implements `kapelle view`, which shows runs in a browser, both while they are written and afterwards."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from kapelle.cli.output import writing
from kapelle.cli.serve import binding_of
from kapelle.runtime.console import say
from kapelle.runtime.interrupts import catch_interrupts, unbroken
from kapelle.services.binding import check_installed


def run(arguments: argparse.Namespace) -> int:
    """Serve the viewer until a signal arrives, and return the exit code of the signal."""
    check_installed("viewer", "starlette", "uvicorn")
    from kapelle.services.http import HttpServer
    from kapelle.viewer.library import Library
    from kapelle.viewer.server import viewer

    binding = binding_of(arguments)
    library = Library([Path(word) for word in arguments.words or ["runs"]])
    if arguments.export is not None:
        file = Path(arguments.export)
        from kapelle.viewer.export import exported

        page = exported(library)
        with writing(file, "--export"), file.open("xb") as opened:
            opened.write(page)
        say(f"{file}: {len(page) / 1e6:.1f} MB, opens in any browser")
        return 0
    stop = threading.Event()
    with (
        catch_interrupts(lambda _: stop.set()) as stopped,
        unbroken(),
        HttpServer(binding, viewer(library, binding)) as server,
    ):
        count = len(library.runs())
        say(f"{count} run{'' if count == 1 else 's'} at {server.url}  (Ctrl-C ends it)")
        stop.wait()
    return stopped.exit_code
