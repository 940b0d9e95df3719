"""The process of a rank in its actor."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from kapelle.cluster import launcher
from kapelle.cluster.launcher import RankHost

PROGRAM = "import os, sys, time; print(sys.argv[1:] + [os.environ.get('RANK'), os.getcwd()], flush=True); time.sleep(1000)"


def started(monkeypatch: object, tmp_path: Path, program: str) -> RankHost:
    monkeypatch.setattr(launcher, "TRAIN", program.replace("{", "{{").replace("}", "}}"))  # type: ignore[attr-defined]
    host = RankHost()
    host.start(["demo"], {"RANK": "1"}, str(tmp_path), sys.path)
    return host


def new_messages(host: RankHost) -> tuple[bytes, int]:
    printed = b""
    while True:
        news, code = host.news()
        printed += b"".join(data for _, data in news)
        if code is not None:
            return printed, code


def test_it_prints_and_ends_like_its_process(monkeypatch: object, tmp_path: Path) -> None:
    host = started(monkeypatch, tmp_path, PROGRAM)
    first = b""
    while not first.endswith(b"\n"):
        first += b"".join(data for _, data in host.news()[0])
    assert first == f"{['demo', '1', str(tmp_path)]}\n".encode()
    host.signal(signal.SIGTERM)
    assert new_messages(host) == (b"", -signal.SIGTERM)


def test_the_process_ends_with_its_actor(monkeypatch: object, tmp_path: Path) -> None:
    held = "from kapelle.runtime.process_tree import end_with_stdin; end_with_stdin(); print('up', flush=True); import time; time.sleep(1000)"
    host = started(monkeypatch, tmp_path, held)
    while not host.news()[0]:
        time.sleep(0.01)
    assert host.process is not None
    assert host.process.stdin is not None
    host.process.stdin.close()  # as the end of the actor's process does
    assert new_messages(host)[1] == 3
