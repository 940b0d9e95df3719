"""Whatever a model's files hold, a command ends with one line that says what is wrong with which."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle
from tests.cli.damage import Damage, bytes_in, cut, folder_at, one_line

MODEL = ("demo", *TINY, "model.path=./model", "warmup=null", "--run-dir", "new")

# A model's file is damaged → (how, what is said of it).
MODEL_FILES: dict[str, tuple[Damage, str]] = {
    "weights, cut": (cut("model/model.safetensors"), "Model './model' cannot be loaded"),
    "weights, empty": (bytes_in("model/model.safetensors", b""), "Model './model' cannot be loaded"),
    "weights, a folder": (folder_at("model/model.safetensors"), "Model './model'"),
    "config.json, garbage": (bytes_in("model/config.json", b"\xff{"), "Model './model' cannot be"),
    "config.json, a list": (bytes_in("model/config.json", b"[]"), "Model './model' cannot be"),
    "config.json, no sizes": (bytes_in("model/config.json", b'{"model_type": "qwen3", "hidden_size": "many", "num_attention_heads": 0}'), "Model './model' cannot be"),
    "tokenizer.json, cut": (cut("model/tokenizer.json"), "Model './model' cannot be loaded"),
    "tokenizer.json, garbage": (bytes_in("model/tokenizer.json", b"\xff"), "Model './model' cannot be loaded"),
    "tokenizer.json, empty": (bytes_in("model/tokenizer.json", b"{}"), "Model './model' cannot be loaded"),
    "tokenizer_config.json, a list": (bytes_in("model/tokenizer_config.json", b"[]"), "Model './model' cannot be loaded"),
}  # fmt: skip

# Chat templates are programs: what they are → (their text, what is said of it).
TEMPLATES = {
    "none": (b"{% for %}", "The chat template of './model'"),
    "raises": (b"{{ raise_exception('users only') }}", "users only"),
    "divides": (b"{{ 1 // 0 }}", "ZeroDivisionError"),
    "unknown filter": (b"{{ messages | shout }}", "The chat template of './model'"),
    "calls itself": (b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "The chat template of './model' failed: RecursionError"),
    "loops": (b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "did not finish within"),
    "no UTF-8": (b"\xff", "Model './model' cannot be loaded"),
}  # fmt: skip
MODEL_FILES |= {
    f"template, {how}": (bytes_in("model/chat_template.jinja", text), told)
    for how, (text, told) in TEMPLATES.items()
}


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


def test_a_template_that_raises_to_a_power_is_refused_unrun(kapelle: Kapelle, whole_model: Path) -> None:
    shutil.copytree(whole_model, "model")
    Path("model/chat_template.jinja").write_text("{{ 2**3 }}")  # a small one, in case it is run all the same
    said = kapelle(*MODEL)
    assert (said.code, one_line(said)) == (2, True)
    assert "The chat template of './model' raises to a power in line 1" in said.err
