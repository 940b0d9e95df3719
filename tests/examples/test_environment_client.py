"""A client in JavaScript plays an episode over the documented protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kapelle.environments.arithmetic import Arithmetic
from kapelle.services.binding import Binding
from kapelle.services.environments.service import serve_environments

CLIENT = Path(__file__).parents[2] / "examples" / "environment_client" / "play.mjs"
TOKEN = "the-right-token-0123456789"  # noqa: S105


@pytest.mark.slow
def test_node_client_plays_episode() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("NOT TESTED: the protocol from another language. Install node to test it.")
    with serve_environments({"sums": Arithmetic(operators=("+", "-"))}, Binding(token=TOKEN)) as server:
        done = subprocess.run(
            [node, "--experimental-websocket", str(CLIENT), server.address, "sums", "11"],
            env={**os.environ, "KAPELLE_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert server.host.sessions == []
    assert done.returncode == 0, done.stderr
    task = Arithmetic(operators=("+", "-")).task("train", 3)
    assert json.loads(done.stdout) == {
        "version": 1,
        "turns": [{"seen": task.question, "said": str(task.data["answer"])}],
        "rewards": {"node": 1},
        "success": 1,
    }
