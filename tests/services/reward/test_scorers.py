"""A reward model of transformers: its logits, whoever is in the batch, and folders that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import tiny_model

from kapelle.errors import ModelError
from kapelle.services.reward.scores import Answered, open_reward_model
from kapelle.types import Message

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
ANSWERS = [
    Answered((Message("user", "2+2"),), "4"),
    Answered((Message("system", "Add."), Message("user", "2+2")), "five"),
    Answered((Message("user", "a"),), "b"),
]


def saved(folder: Path, **settings: Any) -> Path:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = tiny_model().tokenizer
    config = Qwen3Config(**SIZES, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    config.num_labels = 1
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)  # far apart, so that a wrong token shows
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | settings))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_its_logits_are_those_of_transformers(tmp_path: Path, *, padded: bool) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    without: dict[str, Any] = {} if padded else {"pad_token_id": None}
    folder = saved(tmp_path / "judge", **without)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = []
    for each in ANSWERS:
        said = [
            {"role": m.role, "content": m.content} for m in (*each.messages, Message("assistant", each.text))
        ]
        ids = tokenizer(tokenizer.apply_chat_template(said, tokenize=False), add_special_tokens=False)[
            "input_ids"
        ]
        wanted.append(float(theirs(torch.tensor([ids])).logits[0, 0]))
    scorer = open_reward_model(folder)
    too_long = Answered((Message("user", "a"),), "b" * 100)
    *found, ungraded = scorer.score([*ANSWERS, too_long])
    assert [each.logit for each in found] == pytest.approx(wanted, abs=1e-4)
    assert [each.value for each in found] == pytest.approx([1 / (1 + math.exp(-x)) for x in wanted], abs=1e-5)
    assert max(wanted) - min(wanted) > 0.01
    assert ungraded.value is None
    assert "the context of the reward model has 64" in ungraded.reason
    about = scorer.about
    assert (about["name"], about["kind"]) == ("judge", "Qwen3ForSequenceClassification")
    assert about["weights"]


def written(folder: Path, architecture: str, labels: int = 1, **settings: Any) -> Path:
    """Write a folder's settings, and a file of weights that no one gets to read."""
    folder.mkdir()
    names = {str(k): f"LABEL_{k}" for k in range(labels)}
    known = {"model_type": "qwen3", "architectures": [architecture], "id2label": names, **settings}
    (folder / "config.json").write_text(json.dumps(known))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    judge = "Qwen3ForSequenceClassification"
    with pytest.raises(ModelError, match="has 3 labels"):
        open_reward_model(written(tmp_path / "three", judge, labels=3))
    with pytest.raises(ModelError, match="not a reward model"):
        open_reward_model(written(tmp_path / "speaks", "Qwen3ForCausalLM"))
    pickled = written(tmp_path / "pickled", judge)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no weights \(\*\.safetensors\)"):
        open_reward_model(pickled)
    own = {"AutoConfig": "run.Config", "AutoModelForSequenceClassification": "run.Model"}
    code = written(tmp_path / "code", judge, auto_map=own, model_type="mine")
    (code / "run.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_reward_model(code)
