"""A hub that does not answer costs seconds, and the message says how to continue offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.plain_server import answering

from kapelle.errors import ModelError
from kapelle.models.paths import local_only
from kapelle.models.renderer import load_renderer
from kapelle.runtime.hub import hub_fault
from kapelle.settings.schema import ModelConfig


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hub_fault.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield
    hub_fault.cache_clear()


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (200, ""),
        (401, "HTTP 401"),
        (403, "HTTP 403"),
        (404, "HTTP 404"),
    ],
)
def test_every_answer_of_the_hub_has_its_message(
    status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(status) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        fault = hub_fault("some/model")
        assert server.asked == [("/some/model/resolve/main/config.json", "Bearer hf_secret")]
        if not told:
            assert fault is None
            assert not local_only("some/model")
        else:
            assert told in str(fault)
            assert "hf_secret" not in str(fault)
            with pytest.raises(ModelError, match="hf download some/model"):
                load_renderer("some/model", ModelConfig())
        assert len(server.asked) == 1, "asked once for each process"
