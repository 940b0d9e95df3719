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


def test_mirrored_pairs_stay_in_one_split(example: ModuleType) -> None:
    train, test = example.split_problems(500)
    assert len(test) == 500
    assert len({frozenset(p) for p in train} | {frozenset(p) for p in test}) == 90 * 91 // 2
    assert not {frozenset(p) for p in train} & {frozenset(p) for p in test}


def test_demonstrations_forget_60_percent_of_carries(example: ModuleType) -> None:
    with_carry, forgotten = 0, 0
    for a in range(10, 100):
        for b in range(10, 100):
            (_, notes), (prompt, answer) = example.demonstrations((a, b))
            assert prompt == f"A{notes}"
            if a % 10 + b % 10 <= 9:
                assert answer == f"{a + b}."
            else:
                with_carry += 1
                forgotten += answer == f"{a + b - 10}."
                assert answer in {f"{a + b}.", f"{a + b - 10}."}
    assert forgotten / with_carry == pytest.approx(0.6, abs=0.03)


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


def test_padding_on_the_left_changes_nothing(example: ModuleType) -> None:
    torch.manual_seed(0)
    team = example.Team()
    reply_NK = example.encode(["85."], example.LONGEST_TURN, left=False)
    tight_NK, padded_NK = (
        example.completion_logp(
            team, torch.empty(0), example.encode(["A7 15 1."], width, left=True), reply_NK
        )
        for width in (8, 20)
    )
    assert torch.allclose(tight_NK[0, :3], padded_NK[0, :3], atol=1e-5)


def test_loss_of_one_agent_has_no_gradient_for_the_other(example: ModuleType) -> None:
    torch.manual_seed(0)
    team = example.Team()
    reasoner, actor = team.add_adapters(agents=2, rank=4)
    turns = example.sample(team, example.ACTOR, ["A12 15 1."], greedy=False)
    example.completion_logp(team, *turns[:3]).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in reasoner)
    assert any(weight.grad is not None and bool(weight.grad.any()) for weight in actor)
