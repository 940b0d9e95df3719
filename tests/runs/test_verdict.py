"""Planted runs of each kind get their verdict, and normal runs, noisy or short, get no fault."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kapelle.runs.verdict import ADVICE, FAULTS, Verdict, Word, course, judge

EPISODES = 128
Curve = Callable[[int], float]


def played(
    steps: int, seed: int = 0, evaluations: Sequence[Mapping[str, Any]] = (), **curves: Curve
) -> Verdict:
    """Judge a run of a team of two policies. `success` is drawn for a number of episodes; other values are as given."""
    rng = random.Random(seed)
    columns: dict[str, list[float | None]] = {"samples": [float(EPISODES)] * steps}
    for name, curve in {"entropy__a": lambda _: 0.4, "dead_groups": lambda _: 0.2, **curves}.items():
        column = columns.setdefault(name.replace("__", "/"), [])
        for k in range(steps):
            value = curve(k)
            if name == "success":
                value = sum(rng.random() < value for _ in range(EPISODES)) / EPISODES
            column.append(value)
    return judge(range(1, steps + 1), columns, evaluations)


def test_the_noise_of_a_share_by_hand() -> None:
    """Every move is 0.1: 1.4826 times the median of moves, which are differences of two steps, is above their root mean square."""
    found = course(range(12), [0.5, 0.6] * 6, [1e6] * 12)
    assert found is not None
    assert found.sigma == pytest.approx(1.4826 * 0.1 / math.sqrt(2))


def rising(start: float, end: float, steps: int) -> Curve:
    return lambda k: start + (end - start) * k / (steps - 1)


def evaluated(*rows: tuple[int, float, float, float]) -> list[dict[str, Any]]:
    return [{"step": step, "success": mid, "interval": [low, high]} for step, mid, low, high in rows]


def noise(size: float) -> Curve:
    rng = random.Random(7)
    return lambda _: rng.gauss(0.0, size)


PLANTED: list[tuple[Word, str, Verdict]] = [
    ("healthy", "success rose", played(60, success=rising(0.4, 0.8, 60))),
    ("healthy", "stays at", played(60, success=lambda _: 0.98, dead_groups=lambda _: 0.97)),
    ("healthy", "the mean return rose", played(40, return__a=rising(0.0, 3.0, 40))),
    ("healthy", "nats per token fell", played(30, nll__a=lambda k: 2.0 * 0.9**k)),
    ("healthy", "nats per token fell", played(60, nll__a=lambda k: 0.1 * 0.9**k, entropy__a=lambda k: 0.4 * 0.8**k,
        demonstrated_success=lambda _: 1.0, dead_groups=lambda _: 1.0)),
    ("flat", "the share of pairs ranked correctly changed from 0.905", played(60, preference_accuracy__a=lambda k: 0.9 + 0.01 * (k % 2),
        entropy__a=lambda k: 0.4 * 0.8**k, demonstrated_success=lambda _: 0.5)),
    ("healthy", "the divergence from the teacher fell", played(60, teacher_kl__a=lambda k: 2.0 * 0.9**k, success=lambda _: 0.4,
        entropy__a=lambda k: 0.4 * 0.8**k, dead_groups=lambda _: 1.0)),
    ("healthy", "the verifier's AUC rose", played(60, verifier_auc=rising(0.5, 0.9, 60), success=lambda _: 0.4, return__a=lambda _: 0.4,
        dead_groups=lambda _: 1.0)),
    ("flat", "thirds differ", played(200, success=lambda _: 0.4)),
    ("flat", "thirds differ", played(40, return__a=lambda k: 0.5 + 0.01 * (k % 2))),
    # An entropy that was always low, and one that fell to a tenth and is still moderate, have not collapsed.
    ("flat", "thirds differ", played(60, success=lambda _: 0.4, entropy__a=lambda _: 0.03)),
    ("flat", "thirds differ", played(60, success=lambda _: 0.4, entropy__a=lambda k: max(0.2, 4.0 * 0.9**k))),
    ("diverging", "success fell from", played(12, success=lambda k: (0.4, 0.02)[k > 0] * (k < 3))),
    ("diverging", "success fell from", played(80, success=lambda k: 0.3 + 0.01 * k if k < 50 else 0.05)),
    ("diverging", "entropy of a rose from 0.4 to 4.4", played(20, success=lambda _: 0.0, entropy__a=lambda k: 0.4 + 4 * (k > 4))),
    ("diverging", "success fell from 90.3 % at steps 21 to 28 to 49.5 %, and stays low from step 29 on",
        played(40, success=lambda k: 0.5 if k >= 28 else min(0.9, 0.3 + 0.03 * k))),
    *(("diverging", "success fell from 8", played(steps, success=rising(0.9, 0.5, steps))) for steps in (12, 18, 30, 60, 200)),
    ("diverging", "the mean return fell from -1.", played(40, return__a=rising(-1.0, -5.0, 40))),
    ("diverging", "the mean return fell from 0.9", played(40, return__a=lambda k: 0.2 + 0.04 * k if k < 20 else 1.5 - 0.025 * k)),
    ("diverging", "KL to the reference of a rose from 2.25 to 3.57e+03", played(40, success=lambda _: 0.5, kl__a=lambda k: 10 ** (k / 10))),
    ("diverging", "gradient norm of a rose from 0.4 to 40, first above 10 at step 21", played(40, success=lambda _: 0.5, grad_norm__a=lambda k: 0.4 if k < 20 else 40.0)),
    ("diverging", "success on unseen problems fell from 90.0 % at step 60 to 80.0 % at step 120", played(120, success=lambda k: 0.5 - 0.09 * (k >= 70),
        evaluations=evaluated((60, 0.9, 0.86, 0.94), (120, 0.8, 0.76, 0.84)))),
    ("memorising", "while nats per token changed from 1.", played(40, nll__a=lambda k: 2.0 * 0.97**k,
        evaluations=evaluated((20, 0.9, 0.86, 0.94), (40, 0.5, 0.46, 0.54)))),
    ("failing", "70.0 % of episodes ended in an error", played(40, success=rising(0.4, 0.8, 40), failed_episodes=lambda _: 0.7)),
    ("memorising", "while success in training changed from", played(40, success=lambda _: 0.97, return__a=lambda _: 0.97,
        evaluations=evaluated((0, 0.8, 0.75, 0.85), (40, 0.4, 0.35, 0.45)))),
    ("memorising", "while success in training changed from", played(40, success=lambda _: 0.6,
        evaluations=evaluated((0, 0.8, 0.75, 0.85), (40, 0.4, 0.35, 0.45)))),
    ("memorising", "while the mean return changed from", played(40, return__a=noise(0.1),
        evaluations=evaluated((0, 0.8, 0.75, 0.85), (40, 0.4, 0.35, 0.45)))),
    ("diverging", "resulted in non-finite weights in 2 of the last 10", played(30, success=rising(0.4, 0.8, 30), undone__a=lambda k: float(k > 27))),
    ("healthy", "the mean return rose", played(40, return__a=lambda k: min(0.97, 0.5 + 0.05 * k), reward_max__a=lambda _: 1.0,
        entropy__a=lambda k: 0.4 * 0.8**k, dead_groups=lambda _: 0.95)),
    ("starved", "all groups are dead in 40", played(40, return__a=lambda _: 0.3, reward_max__a=lambda _: 0.3, dead_groups=lambda _: 1.0)),
    ("collapsing", "entropy of a fell from", played(40, return__a=lambda k: min(0.7, 0.5 + 0.05 * k), reward_max__a=lambda _: 1.0,
        entropy__a=lambda k: 0.4 * 0.8**k)),
    ("collapsing", "entropy of a fell from 0.155 to 3.46e-06 nats per token, below a tenth from step 16", played(60, success=lambda _: 0.4, entropy__a=lambda k: 0.4 * 0.8**k)),
    ("starved", "all groups are dead in 30 of 40 steps", played(40, success=lambda _: 0.02, dead_groups=lambda k: float(k > 9))),
    ("hacked", "the mean return rose", played(60, success=rising(0.6, 0.5, 60), return__a=rising(0.0, 3.0, 60),
        evaluations=evaluated((0, 0.5, 0.45, 0.55), (20, 0.6, 0.55, 0.65), (60, 0.3, 0.25, 0.35)))),
    ("hacked", "while success fell", played(60, success=rising(0.7, 0.3, 60), return__a=rising(0.0, 3.0, 60))),
    ("memorising", "success in training rose", played(60, success=rising(0.4, 0.9, 60), return__a=rising(0.4, 0.9, 60),
        evaluations=evaluated((0, 0.5, 0.45, 0.55), (60, 0.3, 0.25, 0.35)))),
    ("young", "7 of the 8 steps", played(7, success=lambda _: 0.0, dead_groups=lambda _: 1.0)),
    ("young", "which can be explained by chance", played(12, success=lambda _: 0.4)),
    ("young", "no step", judge([], {})),
    ("unrated", "no reward and no success", played(12)),
]  # fmt: skip


@pytest.mark.parametrize(("word", "said", "found"), PLANTED)
def test_planted_runs_get_their_verdict(word: Word, said: str, found: Verdict) -> None:
    assert found.word == word, found.lines()
    assert said in found.evidence[0].sentence
    assert found.at_fault == (word in FAULTS)


def test_all_evidence_is_listed() -> None:
    found = played(
        40,
        success=lambda k: 0.5 if k >= 28 else 0.9,
        failed_episodes=lambda k: 0.3 * (k > 20),
        evaluations=evaluated((20, 0.9, 0.86, 0.94), (40, 0.5, 0.46, 0.54)),
    )
    assert [(each.word, each.panel, each.step) for each in found.evidence] == [
        ("diverging", "success", 29),
        ("failing", "failed_episodes", 40),
        ("diverging", "success", 20),
    ]
    broken = played(
        12,
        success=lambda k: 0.4 * (k < 1),
        evaluations=evaluated((0, 0.4, 0.36, 0.44), (12, 0.04, 0.02, 0.06)),
    )
    assert [each.word for each in broken.evidence] == ["diverging", "diverging"]


@pytest.mark.parametrize(("steps", "end"), [(8, 0.45), (20, 0.85), (60, 0.45), (200, 0.85)])
def test_normal_runs_rarely_get_a_fault(steps: int, end: float) -> None:
    """At most 2 of 100 runs whose success is constant or rises, with few episodes a step, noise and ten evaluations."""
    accused = 0
    for seed in range(100):
        rng = random.Random(seed)
        wander = [0.0]
        for _ in range(steps):
            wander.append(0.9 * wander[-1] + rng.gauss(0, 0.01))
        path = rising(0.45, end, steps)
        unseen = [
            (k, sum(rng.random() < path(k) for _ in range(200)) / 200)
            for k in range(0, steps, -(-steps // 10))
        ]
        found = played(
            steps,
            seed,
            success=lambda k, path=path, wander=wander: path(k) + wander[k],  # type: ignore[misc]
            evaluations=evaluated(*((k, mid, mid - 0.07, mid + 0.07) for k, mid in unseen)),
        )
        accused += any(each.word in FAULTS and each.word != "flat" for each in found.evidence)
    assert accused <= 2


def test_a_fall_with_good_unseen_problems_means_harder_tasks() -> None:
    def fallen(unseen: float) -> Verdict:
        rows = evaluated(
            (0, 0.4, 0.35, 0.45), (20, 0.8, 0.75, 0.85), (40, unseen, unseen - 0.05, unseen + 0.05)
        )
        return played(40, success=lambda k: 0.9 if k < 20 else 0.6, evaluations=rows)

    assert fallen(0.78).word == "diverging"
    assert fallen(0.82).word == "healthy"


def test_single_steps_without_success_are_no_fall() -> None:
    """An endpoint fails for one step among the last three; then all its episodes count as wrong."""
    for late in (9, 10, 11):
        found = played(12, success=lambda k, late=late: 0.6 * (k != late))  # type: ignore[misc]
        assert found.word == "young", found.lines()


def test_every_word_was_planted_and_has_advice() -> None:
    assert {word for word, *_ in PLANTED} == set(ADVICE)
    assert all(each.meaning and each.remedy and each.page.startswith("docs/") for each in ADVICE.values())


def test_causes_come_before_consequences() -> None:
    """`demo` at fifty times its rate: success falls, entropy jumps, and then every group is dead."""
    found = played(
        12,
        success=lambda k: (0.4, 0.02, 0.0)[min(k, 2)],
        entropy__a=lambda k: min(0.2 + k, 5.1),
        dead_groups=lambda k: float(k > 0),
    )
    assert [each.word for each in found.evidence] == ["diverging", "diverging", "starved"]
    assert [each.panel for each in found.evidence] == ["success", "entropy", "dead_groups"]
    assert [each.step for each in found.evidence] == [2, 3, 2]
    assert "all groups are dead in 11 of 12 steps" in found.evidence[2].sentence


@pytest.mark.parametrize("seed", range(8))
def test_a_noisy_healthy_run_is_healthy(seed: int) -> None:
    """Few episodes a step, gradients that jump, entropy that sinks as it should, evaluations that go up and down."""
    rng = random.Random(seed)
    found = played(
        150,
        seed,
        success=lambda k: min(1.0, max(0.0, 0.35 + 0.3 * (1 - math.exp(-k / 60)) + rng.gauss(0, 0.08))),
        return__a=lambda k: 0.35 + 0.3 * (1 - math.exp(-k / 60)) + rng.gauss(0, 0.08),
        entropy__a=lambda k: 0.5 * math.exp(-k / 80) + rng.uniform(0, 0.05),
        dead_groups=lambda _: rng.uniform(0.3, 0.8),
        grad_norm__a=lambda _: math.exp(rng.gauss(0, 1)),
        evaluations=evaluated(
            *((step, mid := 0.5 + rng.gauss(0, 0.04), mid - 0.08, mid + 0.08) for step in range(0, 150, 10))
        ),
    )
    assert found.word == "healthy", found.lines()


@pytest.mark.parametrize("seed", range(8))
def test_noise_alone_is_no_rise_and_no_fall(seed: int) -> None:
    found = played(100, seed, success=lambda _: 0.3)
    assert found.word in ("flat", "young"), found.lines()


@pytest.mark.parametrize("seed", range(8))
def test_rare_successes_are_no_divergence(seed: int) -> None:
    """One task a step, eight attempts that succeed or fail together: success is 0 in nine steps of ten."""
    rng = random.Random(seed)
    column: list[float | None] = [rng.choice((0.5, 1.0)) if rng.random() < 0.05 else 0.0 for _ in range(300)]
    found = judge(range(300), {"success": column, "scored": [8.0] * 300})
    assert found.word in ("flat", "young"), found.lines()


def test_zero_sum_games_are_not_flat() -> None:
    column: list[float | None] = [0.1, -0.1] * 20
    columns: dict[str, list[float | None]] = {
        "return/a": column,
        "return/b": [-(value or 0.0) for value in column],
    }
    assert judge(range(40), columns, opposed=True).word == "unrated"
    assert judge(range(40), columns).word == "flat"
    falling: list[float | None] = [0.5 * 0.95**k for k in range(40)]
    found = judge(range(40), {**columns, "league/nash_conv": falling}, opposed=True)
    assert found.word == "healthy"
    assert "NashConv fell from 0.4" in found.evidence[0].sentence
    thrice: list[float | None] = [{4: 5.0, 8: 4.5, 12: 5.5}.get(k) for k in range(13)]
    (few,) = judge(range(13), {"return/a": column[:13], "league/nash_conv": thrice}, opposed=True).evidence
    assert few.sentence.startswith("NashConv changed from 5 to 5.5 in 3 measurements, steps 4 to 12;")
    entries: list[float | None] = [float(k) if k % 4 == 0 else None for k in range(40)]
    rated = judge(range(40), {**columns, "league/rating": entries}, opposed=True)
    assert (
        "the newest member's rating rose from 4 to 32 in 10 measurements, steps 0 to 36"
        in rated.evidence[0].sentence
    )


def test_dead_groups_are_no_fault_with_a_critic() -> None:
    found = played(40, success=lambda _: 0.1, dead_groups=lambda _: 1.0, explained_variance__a=lambda _: 0.5)
    assert found.word == "flat"


def test_huge_numbers_break_no_verdict() -> None:
    huge: list[float | None] = [1e308, -1e308, None, 0.0] * 10
    columns = dict.fromkeys(
        ("success", "scored", "return/a", "return/b", "entropy/a", "dead_groups", "undone/a"), huge
    )
    found = judge([1e15] * 40, columns, evaluated((0, 1e308, 1e308, 1e308), (1, -1e308, -1e308, -1e308)))
    assert found.lines()


def test_gaps_and_invalid_evaluations_are_ignored() -> None:
    column: list[float | None] = [None if k % 3 else 0.4 + 0.01 * k for k in range(60)]
    odd: list[dict[str, Any]] = [{"step": 1}, {"step": 2, "success": None, "interval": None}, {"step": True, "success": 1.0, "interval": [0, 1]}, {"step": 3, "success": 0.5, "interval": ["a", 2]}]  # fmt: skip
    assert judge(range(60), {"success": column}, odd).word == "healthy"
    assert judge(range(60), {"success": [None] * 60}).word == "unrated"
