"""The published client package of Tinker trains adapters on kapelle's server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import tiny_model

from kapelle.services.binding import Binding
from kapelle.services.tinker.service import serve_tinker

pytestmark = pytest.mark.apps

PYTHON = os.environ.get("KAPELLE_APPS_PYTHON", "")
"""The interpreter of an environment in which `requirements.txt` is installed."""
KEY = "tml-aaaaaaaaaaaaaaaa"


def trained(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the result of the program, and the number of mixed passes."""
    model = tiny_model(hidden=32, intermediate=64)
    digits = [model.tokenizer.encode(str(k), add_special_tokens=False)[0] for k in range(10)]
    with serve_tinker(model, "tiny", folder, Binding(), keys={"ann": KEY}) as server:
        environment = {**os.environ, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [PYTHON, str(Path(__file__).with_name("tinker_client.py")), server.url, json.dumps(digits)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert not server.service.training.adapters, "the session has ended, so its adapters are gone"
        return json.loads(done.stdout.splitlines()[-1]), server.service.training.mixed


def test_the_published_client_trains(tmp_path: Path) -> None:
    if not PYTHON:
        pytest.skip(
            "needs KAPELLE_APPS_PYTHON, an interpreter with tests/apps/requirements.txt: make test-apps"
        )
    found, _ = trained(tmp_path)
    assert found["rank"] == 8
    losses, rewards, bids, distances = (found[key] for key in ("losses", "rewards", "bids", "distances"))
    assert losses[-1] < 0.5 * losses[0]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, "the model adds better"
    assert bids[-1] > bids[0] + 0.3, "both agents bid higher"
    assert found["continued"][0] == found["continued"][1], "bitwise, as far as the log-probs show"
    assert distances[-1] < 0.7 * distances[0], "the student approaches the teacher"
    assert "`logprobs`" in found["error"]
