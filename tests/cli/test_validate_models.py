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
from tests.support.ranks import free_port

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


def pickled() -> None:
    torch.save(load_file(WEIGHTS), "model/pytorch_model.bin")
    Path(WEIGHTS).unlink()


UP = "model.layers.0.mlp.up_proj.weight"
# What is done to a model's folder → (how, a part of what is said; empty where the model is sound).
DAMAGE: dict[str, tuple[Damage, str]] = {
    "nothing": (lambda: None, ""),
    "cut in the weights": (cut(WEIGHTS, 0.9), "is truncated: it contains"),
    "a pointer of LFS": (bytes_in(WEIGHTS, POINTER), "Git LFS pointer"),
    "a pickle alone": (pickled, "no weights (*.safetensors)"),
    "a weight is missing": (rewritten(lambda t: t.pop(UP)), f"no weights for '{UP}'"),
    "a weight of another shape": (rewritten(lambda t: t.update({UP: torch.zeros(3, 5)})), f"'{UP}' of shape (3, 5)"),
    "shards": (in_shards(lambda: None), ""),
    "shards, one missing": (in_shards(lambda: second_shard().unlink()), "has no model-00002"),
    "no template": (gone("model/chat_template.jinja"), "has no chat template"),
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
def test_validation_and_training_of_every_family_agree(kapelle: Kapelle, family: str) -> None:
    build(family).save_pretrained("model")
    tokenizer().save_pretrained("model")
    validated = kapelle("validate", *RUN)
    trained = kapelle("train", *RUN, "--run-dir", "new")
    assert (trained.code, trained.err) == (validated.code, validated.err), validated
    assert trained.code == (2 if family in ("bert", "xlstm") else 0)


FULL = "team.sharing=shared"
SPLIT = ("train_engine.name=fsdp", "train_engine.tensor_parallel=2", FULL)
# Family (None: the embedded model), what is set, and a part of what is said.
SHAPES: dict[str, tuple[str | None, tuple[str, ...], str]] = {
    "nothing to replay": (None, ("model.routing=replayed",), "Qwen3ForCausalLM has none"),
    "replayed without a cache": ("minimax", ("model.routing=replayed",), "for each token. Set `model.routing: free`"),
    "no router to train": (None, ("model.router=trained", FULL), "Set `model.router: frozen`"),
    "heads of uneven width": (None, ("model.embedded.heads=3",), "`hidden: 16` gives each of 3 heads 5 dimensions"),
    "keys for a part of the heads": (
        None, ("model.embedded.heads=4", "model.embedded.kv_heads=3"), "`kv_heads: 3` does not divide `heads: 4`",
    ),
    "uneven heads that see": (
        None, ("model.embedded.hidden=20", "model.embedded.heads=3", "model.embedded.sees=true"), "to a multiple of 6",
    ),
    "adapters on experts": ("llama", ("team.lora.targets=[experts]",), "LlamaForCausalLM has no layer"),
}  # fmt: skip


@pytest.mark.parametrize("what", SHAPES)
def test_unsupported_settings_of_a_model_are_an_error_before_it_loads(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    family, changed, told = SHAPES[what]
    path = () if family else ("model.path=embedded",)
    if family:
        build(family).save_pretrained("model")
        tokenizer().save_pretrained("model")
    validated = kapelle("validate", *RUN, *path, *changed)
    assert validated.code == 2, validated
    assert one_line(validated)
    assert told in validated.err
    if (
        family == "minimax"
    ):  # what it does with a cache is tried, with a small one of these settings or with itself
        return
    monkeypatch.setattr("kapelle.setup.model_loading.load_language_model", unloaded)
    for words in (("--dry-run",), ("--run-dir", "new")):
        trained = kapelle("train", *RUN, *path, *changed, *words)
        assert (trained.code, trained.err) == (2, validated.err)


def test_a_model_that_cannot_be_split_is_an_error_in_several_processes(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("gpt2").save_pretrained("model")
    tokenizer().save_pretrained("model")
    alone = kapelle("validate", *RUN, *SPLIT)
    told = "`train_engine.tensor_parallel: 2` cannot split './model': `transformers` has no plan for models of type gpt2"
    assert alone.code == 0
    assert told in alone.out
    for embedded, said in (
        ("model.embedded.heads=2", "its 1 heads (`num_key_value_heads`)"),
        ("model.embedded.kv_heads=2", ""),
    ):
        found = kapelle("validate", *RUN, *SPLIT, "model.path=embedded", embedded)
        assert found.code == 0
        assert said in found.out
        assert bool(said) == ("cannot split" in found.out)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # where rank 0 tells the others; its store outlives the command
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("kapelle.setup.model_loading.load_language_model", unloaded)
    launched = kapelle("validate", *RUN, *SPLIT)
    assert launched.code == 2
    assert launched.err.startswith(f"kapelle: {told}")
