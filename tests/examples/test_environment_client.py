"""A client in another language, written from the contract alone, plays an episode."""

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

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "examples" / "environment_client"
TOKEN = "the-right-token-0123456789"  # noqa: S105


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with its two packages, in a folder of its own."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("NOT TESTED: the contract from another language. Install node and npm to test it.")
    folder = tmp_path_factory.mktemp("client")
    for name in ("package.json", "package-lock.json", "play.mjs"):
        shutil.copy(CLIENT / name, folder)
    done = subprocess.run(
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED: the contract from another language. `npm ci` fails: {done.stderr[-500:]}")
    return folder


@pytest.mark.slow
def test_a_client_in_node_plays_an_episode(client: Path) -> None:
    with serve_environments({"sums": Arithmetic(operators=("+", "-"))}, Binding(token=TOKEN)) as server:
        done = subprocess.run(
            ["node", "play.mjs", server.address, "sums", "11"],
            cwd=client,
            env={
                **os.environ,
                "KAPELLE_TOKEN": TOKEN,
                "KAPELLE_PROTO": str(ROOT / "proto/kapelle/wire/environment_v1.proto"),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert len(server.host.sessions) == 0
    assert done.returncode == 0, done.stderr
    task = Arithmetic(operators=("+", "-")).task("train", 3)
    assert json.loads(done.stdout) == {
        "version": "1",
        "turns": [{"seen": task.question, "said": str(task.data["answer"])}],
        "rewards": [{"agent": "node", "amount": 1}],
        "success": 1,
    }
