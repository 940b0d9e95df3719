"""Damaged model files end a command with one line that names the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle
from tests.cli.damage import Damage, bytes_in, cut, one_line

MODEL = ("demo", *TINY, "model.path=./model", "warmup=null", "--run-dir", "new")

# Damage to a model's file → (how, a word of the error).
MODEL_FILES: dict[str, tuple[Damage, str]] = {
    "weights, cut": (cut("model/model.safetensors"), "Model './model' cannot be loaded"),
    "config.json, no sizes": (bytes_in("model/config.json", b'{"model_type": "qwen3", "hidden_size": "many", "num_attention_heads": 0}'), "Model './model' cannot be"),
    "tokenizer.json, garbage": (bytes_in("model/tokenizer.json", b"\xff"), "Model './model' cannot be loaded"),
    "template, raises": (bytes_in("model/chat_template.jinja", b"{{ raise_exception('users only') }}"), "users only"),
    "template, calls itself": (bytes_in("model/chat_template.jinja", b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "RecursionError"),
    "template, loops": (bytes_in("model/chat_template.jinja", b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"), "did not finish within"),
}  # fmt: skip


@pytest.fixture(scope="session")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny import SIZE

    from kapelle.models.checksums import CHECKSUMS
    from kapelle.models.language_model import load_language_model
    from kapelle.models.weights import save_model
    from kapelle.settings.schema import EmbeddedConfig, ModelConfig

    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(folder, load_language_model(ModelConfig(embedded=EmbeddedConfig(**SIZE))))
    (folder / CHECKSUMS).unlink()  # as a model of others is, of which nothing says what it was
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("what", MODEL_FILES)
def test_a_damaged_file_ends_in_one_line(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, whole_model: Path, what: str
) -> None:
    monkeypatch.setattr("kapelle.models.chat_template.LIMIT_S", 1.0)
    damage, told = MODEL_FILES[what]
    shutil.copytree(whole_model, "model")
    damage()
    said = kapelle(*MODEL)
    assert (said.code, one_line(said)) == (2, True), said
    assert told in said.err


def test_a_template_with_a_power_is_an_error_and_does_not_run(kapelle: Kapelle, whole_model: Path) -> None:
    shutil.copytree(whole_model, "model")
    Path("model/chat_template.jinja").write_text("{{ 2**3 }}")
    said = kapelle(*MODEL)
    assert (said.code, one_line(said)) == (2, True)
    assert "The chat template of './model'" in said.err
