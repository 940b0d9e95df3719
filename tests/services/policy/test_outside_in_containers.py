"""Programs in containers and on other machines reach the server of a training run by TLS and a token."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tests.services.policy.test_outside import say, session, trainer
from tests.support.serving import Watching
from tests.support.tls import certificate_here

from kapelle.errors import ConfigError

TOKEN = "a-token-that-is-long-enough"  # noqa: S105 - of no service
ANYWHERE = "0.0.0.0"  # noqa: S104 - what is tested


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("KAPELLE_TOKEN", TOKEN)
    certificate, key = certificate_here(tmp_path)
    return {"tls_cert": str(certificate), "tls_key": str(key)}


@pytest.mark.slow
def test_programs_train_over_tls_and_others_are_rejected(
    tls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", tls["tls_cert"])  # as a container is told
    watching = Watching()
    environment = {"host": ANYWHERE, "address": "localhost", **tls}
    over = {"steps": 1, "tasks_per_step": 1, "max_failed_share": 0.0}
    with trainer(watching, environment, algorithm={"name": "grpo", "group_size": 2}, training=over) as made:
        trusted = ssl.create_default_context(cafile=tls["tls_cert"])

        def work() -> None:
            with OpenAI(base_url=watching.url, api_key=TOKEN, max_retries=0) as client:
                for _ in range(2):
                    own = session(client, client.post("/task", body={}, cast_to=dict[str, Any]))
                    say(own, "planner", [{"role": "user", "content": "x"}])
                    own.post("/reward", body={"reward": 1.0}, cast_to=object)

        with httpx.Client(verify=trusted) as stranger:
            for headers in ({}, {"authorization": "Bearer none"}, {"authorization": f"Bearer {TOKEN[:-1]}"}):
                for path in ("task", "sessions", "reward", "chat/completions"):
                    assert (
                        stranger.post(f"{watching.url}/{path}", json={}, headers=headers).status_code == 401
                    )
            expected = {"authorization": f"Bearer {TOKEN}", "host": "elsewhere.example"}
            assert stranger.get(f"{watching.url}/models", headers=expected).status_code == 421
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{watching.url}/models".replace("https", "http"))
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
            httpx.get(f"{watching.url}/models", verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        [step] = made.steps()
        thread.join(60.0)
    assert [episode.error for group in step.groups for episode in group.episodes] == [None, None]


@pytest.mark.parametrize("host", [ANYWHERE, "trainer.example"])
@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ((), "needs TLS .*tls_cert.* and a token of .*16 characters.*KAPELLE_TOKEN"),
        (
            ("token",),
            r"needs TLS \(`environment.tls_cert` and `environment.tls_key`\)\. Add",
        ),
        (("tls",), "needs a token of .*16"),
        (("tls", "short"), "needs a token of .*16"),
    ],
)
def test_a_public_address_needs_tls_and_a_token(
    host: str, given: tuple[str, ...], lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAPELLE_TOKEN", raising=False)
    if "token" in given or "short" in given:
        monkeypatch.setenv("KAPELLE_TOKEN", TOKEN if "token" in given else "short")
    certificate, key = certificate_here(tmp_path)
    tls = {"tls_cert": str(certificate), "tls_key": str(key)} if "tls" in given else {}
    with pytest.raises(ConfigError, match=lacking) as raised:
        trainer(Watching(), {"host": host, "address": "localhost", **tls})
    assert f"`environment.host: {host}`" in str(raised.value)
