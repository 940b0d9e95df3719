"""What several processes have learned stands whole in a checkpoint, as PEFT and transformers load it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs.test_saved_adapters import scored
from tests.support.ranks import run_ranks
from tests.support.tiny import draw_samples, sections, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

import peft

from kapelle import Trainer
from kapelle.runs.reader import read_latest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TEAMS: dict[str, Any] = {
    "agent_0": {"agents": 2, "lora": {"rank": 2, "alpha": 5.0}},
    "shared": {"agents": 2, "sharing": "shared"},
}
"""By the policy that is looked at: an adapter, and all weights of a model."""


def learned(run: Path, policy: str, engine: str, background: bool) -> Tensor:
    """Train two steps and return the log-probs of a policy's samples."""
    settings = sections(
        model=tiny_model(),
        team={**TEAMS[policy], "sampling": {"max_tokens": 4}},
        optimizer={"lr": 0.03},
        train_engine={"name": engine},
        checkpoint={"every": 2, "background": background},
    )
    with Trainer(**settings, run_dir=run) as trainer:
        list(trainer.steps(2))
        return torch.cat(trainer.engine.score(draw_samples([policy], [(5, 4), (3, 6)])))


@pytest.mark.ranks
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("policy", TEAMS)
def test_others_compute_with_it_what_the_ranks_did(
    tmp_path: Path, policy: str, engine: str, background: bool
) -> None:
    said = run_ranks(2, learned, tmp_path / "run", policy, engine, background)
    assert torch.equal(said[0], said[1])
    newest = read_latest(tmp_path / "run")
    assert newest is not None
    assert newest.name == "00000002"
    plain = copy.deepcopy(tiny_model().model)
    assert float((scored(plain) - said[0]).abs().max()) > 0.01
    place = str(newest / "policies" / policy)
    theirs: Any = (
        peft.PeftModel.from_pretrained(plain, place)
        if policy != "shared"
        else AutoModelForCausalLM.from_pretrained(place)
    )
    assert float((scored(theirs.eval()) - said[0]).abs().max()) < 1e-5
