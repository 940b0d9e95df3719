"""Mistakes in the mathematics, each made in a copy of the sources, where the named test must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """One mistake."""

    file: str
    """Below src/kapelle."""
    correct: str
    """Text that occurs once in that file."""
    broken: str
    test: str
    """Below tests."""


MUTANTS = {
    "clipping takes the larger objective": Mutant(
        "functional/policy_losses.py",
        "-torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)",
        "-torch.maximum(ratio * advantage, ratio.clamp(low, high) * advantage)",
        "functional/test_policy_losses.py::test_clipped_surrogate_by_hand",
    ),
    "RLOO's baseline includes the completion itself": Mutant(
        "functional/advantages.py",
        "others_G = (count_G - 1).clamp(min=1)",
        "others_G = count_G",
        "functional/test_advantages.py::test_leave_one_out_by_hand",
    ),
    "QMIX's first layer has weights of any sign": Mutant(
        "functional/mixing.py",
        "w1_BAH.abs()",
        "w1_BAH",
        "algorithms/value_decomposition/test_utilities.py::TestMonotonicity",
    ),
    "MARS normalises before it sums": Mutant(
        "functional/advantages.py",
        "group_scaled(turn_return_to_go(reward_B, trajectory_B, 1.0), player_B, players)",
        "turn_return_to_go(group_scaled(reward_B, player_B, players), trajectory_B, 1.0)",
        "algorithms/shared/test_monte_carlo.py::TestMARS::test_two_players_by_hand",
    ),
    "HAPPO updates without the factor of earlier agents": Mutant(
        "algorithms/shared/orders.py",
        "factor_S[place].float()",
        "1.0",
        "training/test_updates.py::TestFactor::test_two_agents_by_hand",
    ),
    "advantages are whitened over all policies": Mutant(
        "algorithms/shared/gae.py",
        '{"policy": turn.policy, ',
        '{"policy": "", ',
        "algorithms/test_ppo.py::TestNormalisation::test_each_policy_has_its_own_mean_and_spread",
    ),
    "a truncated episode counts as terminated": Mutant(
        "algorithms/shared/gae.py",
        "path.reward_T[-1] += after[key] - path.later[-1]",
        "path.reward_T[-1] -= path.later[-1]",
        "algorithms/test_ppo.py::TestTwoTurns::test_the_critic_s_value_replaces_a_truncated_future",
    ),
    "the KL penalty is a bonus": Mutant(
        "algorithms/shared/surrogate.py",
        "loss_K = loss_K + s.kl_coefficient * kl_K",
        "loss_K = loss_K - s.kl_coefficient * kl_K",
        "algorithms/test_expected_steps.py::test_references_are_the_policy_as_it_was_after_every_so_many_steps",
    ),
    "DPO prefers the rejected answer": Mutant(
        "algorithms/dpo.py",
        "(pairs, 1.0), (pairs, -1.0)",
        "(pairs, -1.0), (pairs, 1.0)",
        "algorithms/test_dpo.py::test_credit_marks_all_turns_of_both_sides_and_leaves_the_rest_out",
    ),
    "groups mix tasks": Mutant(
        "algorithms/shared/groups.py",
        "(g, agent)",
        "(agent,)",
        "algorithms/shared/test_groups.py::test_every_trained_turn_is_in_exactly_one_set_and_no_set_mixes_tasks",
    ),
    "MAPPO's critic reads the agent's view alone": Mutant(
        "algorithms/mappo.py",
        '"central"',
        '"local"',
        "algorithms/test_ppo.py::TestIdentities::test_mappo_differs_from_ippo_only_in_its_critic",
    ),
    "CORY's agents never exchange roles": Mutant(
        "algorithms/cory.py",
        "engine.exchange(*team.trained[:2])",
        "pass",
        "training/test_loop_further_play.py::TestRoles::test_they_change_places_when_it_is_time_and_not_before",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_the_text_of_a_mistake_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / "src/kapelle" / mutant.file).read_text("utf-8").count(mutant.correct) == 1


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_the_named_test_finds_the_mistake(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src/kapelle", tmp_path / "kapelle", ignore=shutil.ignore_patterns("__pycache__"))
    run = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", f"tests/{mutant.test}"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(run, cwd=ROOT, env=environ, capture_output=True, check=False).returncode == 0
    file = tmp_path / "kapelle" / mutant.file
    file.write_text(file.read_text("utf-8").replace(mutant.correct, mutant.broken), "utf-8")
    assert subprocess.run(run, cwd=ROOT, env=environ, capture_output=True, check=False).returncode == 1
