"""Answers end where the chat template ends them, whatever a model's lists of end tokens say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.thinking import thinking_tokenizer
from tests.support.tiny import tiny_model
from torch import nn

from kapelle.cli import main
from kapelle.models.language_model import load_language_model
from kapelle.models.renderer import light_renderer, load_renderer
from kapelle.runs.reader import read_episodes
from kapelle.settings.schema import ModelConfig

SMALL = [
    "training.steps=1",
    "training.tasks_per_step=1",
    "algorithm.group_size=2",
    "evaluation.problems=1",
    "evaluation.problems_while_training=1",
]


def base_folder(folder: Path, end: str = "<|im_end|>") -> Path:
    """Save a base model with ChatML whose lists of end tokens lack `<|im_end|>`, and which writes nothing but that."""
    model, tokenizer = tiny_model(context=512).model, thinking_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", end)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name or "embed_tokens" in name else 0.0)
        model.lm_head.weight[tokenizer.get_vocab()["<|im_end|>"]] = 9.0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_base_model_with_chatml_stops_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "warmup=null", f"model.path={base_folder(tmp_path / 'model')}", *SMALL]
    assert main(["validate", *words]) == 0
    assert "<|im_end|>" in capsys.readouterr().out
    assert main(["train", *words, "--run-dir", str(tmp_path / "run"), "--no-rich"]) == 0
    assert "<|im_end|>" in capsys.readouterr().out
    turns = [turn for episode in read_episodes(tmp_path / "run", 1) for turn in episode.turns]
    assert {(len(turn.completion_ids), turn.finish_reason) for turn in turns} == {(1, "stop")}
    assert (
        main(["export", str(tmp_path / "run"), "--merge", "--agent", "actor", "--out", str(tmp_path / "out")])
        == 0
    )
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert turns[0].completion_ids[0] in ends


def test_all_readers_of_a_folder_agree(tmp_path: Path) -> None:
    path = str(base_folder(tmp_path))
    config = ModelConfig(path=path)
    whole, light, model = (
        load_renderer(path, config),
        light_renderer(path, config),
        load_language_model(config),
    )
    assert whole.end_ids == light.end_ids == model.end_ids
    assert len(model.end_ids) == 2
    assert whole.notes == light.notes


def test_a_listed_end_needs_no_word(tmp_path: Path) -> None:
    folder = base_folder(tmp_path)
    file = folder / "generation_config.json"
    known = json.loads(file.read_text())
    end = thinking_tokenizer().get_vocab()["<|im_end|>"]
    file.write_text(json.dumps({**known, "eos_token_id": [end]}))
    assert (
        light_renderer(str(folder), ModelConfig()).notes
        == load_renderer(str(folder), ModelConfig()).notes
        == ()
    )


def test_an_unknown_end_token_is_named(tmp_path: Path) -> None:
    folder = base_folder(tmp_path, "[end]")
    [note] = load_renderer(str(folder), ModelConfig()).notes
    assert "[end]" in note
    assert 'team.sampling.stop: ["[end]"]' in note
