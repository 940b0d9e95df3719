from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.cli.conftest import Kapelle, Said

pytest.importorskip("starlette")

from kapelle.setup.recipe import load_recipe, to_yaml


def test_a_port_or_file_in_use_is_an_error_before_a_model_loads(
    kapelle: Kapelle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*_: object, **__: object) -> None:
        raise AssertionError("loads the run")

    monkeypatch.setattr("kapelle.training.served.open_served", loads)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load_recipe("demo").config), "utf-8")
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "file").write_text("", "utf-8")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        for words, said in (
            (["serve", "run", "--port", taken], f"Cannot listen on 127.0.0.1:{taken}"),
            (["serve", "policy", "run", "--port", taken], f"Cannot listen on 127.0.0.1:{taken}"),
            (["serve", "reward", "run", "--port", "0", "--grpc-port", taken], f"on 127.0.0.1:{taken}"),
            (["serve", "policy", "run", "--port", "0", "--record", "file/in"], "file/in cannot be written"),
            (["chat", "run", "--agent", "acter"], "Did you mean 'actor'?"),
            (["chat", "run@7"], "run has no complete checkpoint of step 7."),
        ):
            done = kapelle(*words)
            assert done.code == 2
            assert said in done.err
            assert len(done.err.splitlines()) == 1


@pytest.mark.slow
def test_a_signal_ends_a_server_after_its_accepted_calls(finished: tuple[Path, Said]) -> None:
    """Four calls are in progress at SIGTERM; each gets its whole answer, and the exit code is the signal's."""
    run, _ = finished
    command = [sys.executable, "-c", MAIN, "serve", "policy", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = re.search(r"http://[^/]+", process.stdout.readline())
        assert url is not None
        body = {
            "model": "demo/actor",
            "messages": [{"role": "user", "content": "1"}],
            "max_tokens": 40,
            "n": 4,
        }
        with ThreadPoolExecutor(4) as pool, httpx.Client(timeout=60.0) as client:
            calls = [pool.submit(client.post, f"{url[0]}/v1/chat/completions", json=body) for _ in range(4)]
            accepted = 0
            while accepted == 0 and not all(each.done() for each in calls):
                accepted = client.get(f"{url[0]}/health").json()["under_way"]
            process.send_signal(signal.SIGTERM)
            answers = [each.result() for each in calls if each.exception() is None]
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.communicate()
    assert {answer.status_code for answer in answers} <= {200}
    assert {len(answer.json()["choices"]) for answer in answers} <= {4}
    assert len(answers) * 4 >= accepted


MAIN = "import sys\nfrom kapelle.cli import main\nsys.argv[0] = 'kapelle'\nmain()"
