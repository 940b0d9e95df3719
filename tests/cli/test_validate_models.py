"""What `kapelle validate` says of a model is what `kapelle train` does with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.conftest import TINY, Kapelle
from tests.cli.damage import Damage, bytes_in, cut, gone, one_line
from tests.support.families import FAMILIES, build, tokenizer

RUN = ("demo", *TINY, "model.path=./model", "warmup=null", "training.steps=1")
WEIGHTS = "model/model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4242\n"


def rewritten(change: Callable[[dict[str, Any]], object], file: str = WEIGHTS) -> Damage:
    def damage() -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return damage


def settings(**changed: object) -> Damage:
    def damage() -> None:
        said = json.loads(Path("model/config.json").read_text())
        Path("model/config.json").write_text(json.dumps(said | changed))

    return damage


def in_shards(then: Damage) -> Damage:
    def damage() -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained("model")
        Path(WEIGHTS).unlink()
        model.save_pretrained("model", max_shard_size="8KB")
        assert len(list(Path("model").glob("model-*-of-*.safetensors"))) > 3
        then()

    return damage


def second_shard() -> Path:
    return next(Path("model").glob("model-00002-*"))


def renamed(file: str, other: str) -> Damage:
    return lambda: Path(file).rename(other)


def pickled() -> None:
    torch.save(load_file(WEIGHTS), "model/pytorch_model.bin")
    Path(WEIGHTS).unlink()


UP = "model.layers.0.mlp.up_proj.weight"
# What is done to a model's folder → (how, a part of what is said; empty where the model is sound).
DAMAGE: dict[str, tuple[Damage, str]] = {
    "nothing": (lambda: None, ""),
    "cut in the weights": (cut(WEIGHTS, 0.9), "is cut off: it holds"),
    "cut by a byte": (cut(WEIGHTS, 1 - 1e-5), "is cut off: it holds"),
    "cut in the head": (lambda: Path(WEIGHTS).write_bytes(Path(WEIGHTS).read_bytes()[:40]), "cut off in its head"),
    "empty": (bytes_in(WEIGHTS, b""), "has 0 bytes"),
    "too long": (lambda: Path(WEIGHTS).write_bytes(Path(WEIGHTS).read_bytes() + b"x"), "longer than its head"),
    "a pointer of LFS": (bytes_in(WEIGHTS, POINTER), "pointer of Git LFS"),
    "a page of HTML": (bytes_in(WEIGHTS, b"<!DOCTYPE html><html>" * 9), "no safetensors file"),
    "a pickle alone": (pickled, "no weights (*.safetensors)"),
    "weights under another name": (renamed(WEIGHTS, "model/consolidated.safetensors"), "neither model.safetensors"),
    "a weight is missing": (rewritten(lambda t: t.pop(UP)), f"no weights for '{UP}'"),
    "a weight of another shape": (rewritten(lambda t: t.update({UP: torch.zeros(3, 5)})), f"'{UP}' of shape (3, 5)"),
    "a weight too many": (rewritten(lambda t: t.update({"score.weight": torch.zeros(1, 16)})), "'score.weight'"),
    "another type": (rewritten(lambda t: t.update({k: v.to(torch.bfloat16) for k, v in t.items()})), ""),
    "another width in config.json": (settings(intermediate_size=48), "of shape"),
    "another family in config.json": (settings(model_type="gpt2"), "Model './model'"),
    "a quantisation that is not here": (
        settings(quantization_config={"quant_method": "gptq", "bits": 4}), "Model './model'",
    ),
    "fewer words in config.json": (settings(vocab_size=100), "has embeddings for 100"),
    "shards": (in_shards(lambda: None), ""),
    "shards, one missing": (in_shards(lambda: second_shard().unlink()), "has no model-00002"),
    "shards, one cut": (in_shards(lambda: second_shard().write_bytes(second_shard().read_bytes()[:-9])), "model-00002"),
    "shards, no index": (in_shards(gone("model/model.safetensors.index.json")), "neither model.safetensors"),
    "shards, the index a list": (in_shards(bytes_in("model/model.safetensors.index.json", b"[]")), "lists no shards"),
    "no tokeniser": (gone("model/tokenizer.json"), "Model './model'"),
    "no template": (gone("model/chat_template.jinja"), "has no chat template"),
    "a short context": (settings(max_position_embeddings=8), "the model reads 8"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny import tiny_model

    folder = tmp_path_factory.mktemp("models") / "model"
    model = tiny_model()
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def compared(kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """Validate and train `./model`; both end in the same line, before weights are loaded."""
    validated = kapelle("validate", *RUN)
    assert validated.code == (2 if told else 0), validated
    assert not told or (one_line(validated) and told in validated.err), validated
    if told:
        monkeypatch.setattr("kapelle.setup.model_loading.load_language_model", unloaded)
    trained = kapelle("train", *RUN, "--run-dir", "new")
    assert (trained.code, trained.err) == (validated.code, validated.err)


def unloaded(*_: object, **__: object) -> None:
    raise AssertionError("weights were loaded")


def test_weights_that_are_cut_off_are_found_before_they_are_loaded(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, sound: Path
) -> None:
    shutil.copytree(sound, "model")
    cut(WEIGHTS, 0.9)()
    compared(kapelle, monkeypatch, "is cut off: it holds")


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_model_is_found_before_it_is_loaded(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, sound: Path, what: str
) -> None:
    damage, told = DAMAGE[what]
    shutil.copytree(sound, "model")
    damage()
    compared(kapelle, monkeypatch, told)


PLAYED = ("gpt2", "granite", "mamba2", "bert")
"""Families that `make test` trains; `make test-models` trains all."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[pytest.mark.slow, *([] if f in PLAYED else [pytest.mark.models])])
        for f in FAMILIES
    ],
)
def test_validate_says_of_every_family_what_training_does(kapelle: Kapelle, family: str) -> None:
    build(family).save_pretrained("model")
    tokenizer().save_pretrained("model")
    validated = kapelle("validate", *RUN)
    trained = kapelle("train", *RUN, "--run-dir", "new")
    assert (trained.code, trained.err) == (validated.code, validated.err), validated
    assert trained.code == (2 if family in ("bert", "xlstm") else 0)
