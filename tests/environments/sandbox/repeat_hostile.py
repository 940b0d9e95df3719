"""Runs every hostile program many times, several at once, and counts what got through.

    python -m tests.environments.sandbox.repeat_hostile --repeats 20 --parallel 8

Prints one line of JSON and exits with 1 when anything got through or was left behind.
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.environments.grading.code.test_spoofing import (
    CHANGES,
    HARD_CODED,
    JSON_BOMBS,
    SEARCHES,
    SPOOFS,
    TESTS,
    crafted_reply,
)
from tests.environments.sandbox.test_hostile import (
    PROGRAMS,
    Host,
    assert_contained,
    attack,
    everything_of_this_process,
    survivors,
)

from kapelle.environments.grading.code.grade import ProgramTests, grade_program
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import backend, require

REWARDLESS = {
    **SPOOFS,
    **SEARCHES,
    **{f"reply: {what}": crafted_reply(what) for what in JSON_BOMBS},
    "changes": CHANGES,
    "hard-coded": HARD_CODED,
}
ANSWER = ProgramTests(("assert answer(1) == 'gold-738291'",))
LIMITS = Limits(wall_s=20.0, cpu_s=3.0)


def attempt(sandbox: Bubblewrap, name: str, host: Host, patience: float) -> str:
    """Run one program once; return what was wrong, nothing when it was contained."""
    marker = f"hostile-{secrets.token_hex(8)}"
    hostile = PROGRAMS[name]
    # Many at once share few cores: a program that would end by itself needs longer for it.
    if hostile.ends == {"end"}:
        hostile = replace(hostile, limits=replace(hostile.limits, wall_s=hostile.limits.wall_s * patience))
    try:
        assert_contained(hostile, attack(sandbox, hostile, host, marker))
    except AssertionError as error:
        return f"{name}: {str(error)[:200]}"
    left = survivors(marker)
    return f"{name}: processes {left} survived" if left else ""


def spoof(sandbox: Bubblewrap, name: str) -> str:
    """Grade one spoof; return what was wrong, nothing when it was worth nothing."""
    tests = ANSWER if name in SEARCHES else TESTS
    grade = grade_program(REWARDLESS[name], tests, sandbox, LIMITS)
    wrong = grade.solved if name in {"changes", "hard-coded"} else grade.score > 0.0
    return f"{name}: {grade}" if wrong or grade.status != "graded" else ""


def main() -> int:
    """Run all, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=8)
    options = parser.parse_args()
    sandbox = Bubblewrap()
    require(backend("bubblewrap"))
    started, before = time.monotonic(), everything_of_this_process()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as tcp:
        secret = Path(folder, "secret")
        secret.write_text("token")
        with socket.socket(socket.AF_UNIX) as unix, ThreadPoolExecutor(options.parallel) as threads:
            name = f"kapelle-{secrets.token_hex(4)}"
            unix.bind(f"\0{name}")
            unix.listen()
            host = Host(secret, tcp.getsockname()[1], name)
            names = list(PROGRAMS) * options.repeats
            spoofs = list(REWARDLESS) * options.repeats
            said = threads.map(lambda name: attempt(sandbox, name, host, float(options.parallel)), names)
            graded = threads.map(lambda name: spoof(sandbox, name), spoofs)
            faults = [text for text in [*said, *graded] if text]
        if secret.read_text() != "token":
            faults.append("the secret was overwritten")
    if everything_of_this_process() != before:
        faults.append("descriptors, mounts or files were left")
    sys.stdout.write(
        json.dumps(
            {
                "programs": len(PROGRAMS),
                "spoofs": len(REWARDLESS),
                "runs": len(names) + len(spoofs),
                "parallel": options.parallel,
                "contained and unrewarded": len(names) + len(spoofs) - len(faults),
                "seconds": round(time.monotonic() - started, 1),
                "faults": faults,
            }
        )
        + "\n"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
