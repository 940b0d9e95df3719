"""The one-file example runs at toy size, and its learning rule is GRPO's."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.slow
def test_fast_run_reports_before_and_after() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--fast"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines() if "unseen" in line] == [
        "before",
        "after",
    ]


def test_imports_only_torch_and_transformers() -> None:
    imported = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}


def test_advantages_by_hand(example: ModuleType) -> None:
    # One right of four: mean 1/4, standard deviation (ddof 1) 1/2. All right: nothing to learn.
    reward_PG = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(example.group_advantage(reward_PG), expected, atol=1e-4)


def test_loss_by_hand(example: ModuleType) -> None:
    # The Reasoner has one token at ratio 2 with A = 1, clipped at 1.2. The Actor has two at ratio 1/2 with
    # A = -1, clipped at -0.8. The loss sums the means per agent: -(1.2 - 0.8).
    logp_NK = torch.log(torch.tensor([[2.0, 9.0], [0.5, 0.5]]))
    reply_NK = torch.tensor([[1, example.PAD], [1, 2]])
    turns = example.Turns(
        torch.tensor([example.REASONER, example.ACTOR]), torch.zeros(2, 1), reply_NK, torch.zeros(2, 2)
    )
    assert example.clipped_loss(logp_NK, turns, torch.tensor([1.0, -1.0])).item() == pytest.approx(-0.4)


def test_sampler_and_learner_agree_with_padding_cache_and_adapters(example: ModuleType) -> None:
    torch.manual_seed(0)
    team = example.Team()
    adapters = team.add_adapters(agents=2, rank=4)
    with torch.no_grad():
        for weight in (weight for weights in adapters for weight in weights):
            weight.normal_(std=0.3)
    turns, _ = example.play(team, [(10, 11), (47, 85), (99, 99)], greedy=False)
    reply_NK = turns.completion_NK != example.PAD
    learner_NK = example.completion_logp(team, *turns[:3])
    assert torch.allclose(learner_NK[reply_NK], turns.logp_NK[reply_NK], atol=1e-4)
