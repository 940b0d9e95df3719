"""Self-distillation: by hand, its expected gradient enumerated, where contexts come from, and a team that learns from reports."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.lab import Arm, TableRun, recipe_of
from tests.support.episodes import episode, group, turn
from tests.support.expected import ARMS, LONG_AND_SHORT, MARK, Game, Run, Tables
from tests.support.tables import TOKENS
from tests.support.tiny import sections, team_of, tiny_model
from torch import Tensor

from kapelle import Trainer
from kapelle.algorithms.self_distill import SelfDistill, SelfTaughtCredit
from kapelle.algorithms.signals.self_teacher import SELF_TEACHER, SelfTeacherLogProbs, context_of, prompt_with
from kapelle.errors import ConfigError
from kapelle.functional.divergences import Divergence
from kapelle.rows import Sample, Sampled, Signals, TurnKey
from kapelle.types import Group, Message, Task, Turn

KEY = TurnKey(0, 0, 0)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        ("reverse", [0.5, -1.0]),
        ("forward", [math.e**0.5 - 1, 1 / math.e - 1]),  # 0.649, −0.632
        ("jensen_shannon", [0.5 * math.log((1 + math.e**0.5) / 2), 0.5 * math.log((1 + 1 / math.e) / 2)]),
    ],
)
def test_by_hand(divergence: Divergence, expected: list[float]) -> None:
    # log T − log π = −½ − −1 = ½, then −3 − −2 = −1. The second turn has no context.
    said = group(
        episode(
            turn("a", 0, completion_ids=(5, 6), logprobs=(-1.0, -2.0)),
            turn("a", 1, completion_ids=(5,), logprobs=(-1.0,)),
        )
    )
    give = SelfTaughtCredit(divergence)
    credit = give([said], Signals(more={SELF_TEACHER: {KEY: torch.tensor([-0.5, -3.0])}}))
    assert credit[KEY].advantage_T.tolist() == pytest.approx(expected, abs=1e-6)
    assert [each.weight for each in credit.values()] == [1.0, 0.0]
    assert give.metrics() == pytest.approx({"self_teacher_kl/a": 0.25, "taught_share/a": 0.5})


# -------- The expected update


def distance(pi_V: Tensor, target_V: Tensor, divergence: Divergence) -> Tensor:
    """A divergence of two distributions from its definition."""

    def kl(one_V: Tensor, other_V: Tensor) -> Tensor:
        return (one_V * (one_V.log() - other_V.log())).sum()

    if divergence == "reverse":
        return kl(pi_V, target_V)
    if divergence == "forward":
        return kl(target_V, pi_V)
    middle_V = (pi_V + target_V) / 2
    return (kl(pi_V, middle_V) + kl(target_V, middle_V)) / 2


REPORTS = ("first", "second", "third")
"""What an environment reports; as a prompt, each is a token of its own before the mark."""


def hinted(text: str) -> tuple[int, ...]:
    return (10 + next(k for k, report in enumerate(REPORTS) if report in text), MARK)


def reported(groups: list[Group], report: dict[tuple[int, ...], str]) -> list[Group]:
    """The same groups, in which the environment reports something on every completion."""
    return [
        group(
            *(
                replace(e, info={"explanations": {"a": report[e.turns[0].completion_ids]}})
                for e in each.episodes
            )
        )
        for each in groups
    ]


def taught_tables(game: Game) -> Tables:
    """Tables that sample, and that answer otherwise where a report is in the prompt."""
    tables = Tables(game, None)
    generator = torch.Generator().manual_seed(4)
    for report in REPORTS:
        for begun in ((), (1,)):
            row = tables.model.row((*hinted(report), *begun))
            tables.logits["a"].data[row] = torch.randn(TOKENS, generator=generator).double()
    tables.model.renderer = SimpleNamespace(context=99, start=lambda messages: hinted(messages[-1].content))
    return tables


def probabilities(tables: Tables, prefix: tuple[int, ...], tokens: list[int]) -> Tensor:
    logp = [tables.log_probs("a", (*prefix, token), [len(prefix)]) for token in tokens]
    return torch.cat(logp).exp()


def update(divergence: Divergence, game: Game, report: dict[tuple[int, ...], str]) -> tuple[Tables, Tensor]:
    """Return the tables before an update with a whole population, and by how much it moves them."""
    tables = taught_tables(game)
    before = {name: logits.detach().clone().requires_grad_() for name, logits in tables.logits.items()}
    algorithm = SelfDistill(context=("feedback",), divergence=divergence, group_size=1).build()
    Run(algorithm, tables).step(reported(game.population(1), report))
    tables.logits = before
    return tables, tables.ascent["a"]


def check_descends(tables: Tables, moved: Tensor, objective: Tensor) -> None:
    (gradient,) = torch.autograd.grad(objective, tables.logits["a"])
    factor = float(-(moved * gradient).sum() / gradient.square().sum())
    assert factor > 0
    torch.testing.assert_close(moved, -factor * gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("divergence", ["reverse", "forward", "jensen_shannon"])
def test_the_expected_update_descends_the_divergence(divergence: Divergence) -> None:
    game = Game(("a",), lambda said: {"a": 0.0}, LONG_AND_SHORT)
    tables, moved = update(divergence, game, dict.fromkeys(LONG_AND_SHORT, "first"))
    total = torch.zeros((), dtype=torch.float64)
    # Positions occur as often as they were sampled: the first always, the second after the token 1 in two of four times.
    for begun, reach in (((), 1.0), ((1,), 0.5)):
        pi_V = probabilities(tables, (*game.prompt(()), *begun), [0, 1])
        target_V = probabilities(tables, (*hinted("first"), *begun), [0, 1]).detach()
        total = total + reach * distance(pi_V, target_V, divergence)
    check_descends(tables, moved, total)


def test_a_report_on_the_completion_judges_this_completion() -> None:
    game = Game(("a",), lambda said: {"a": 0.0}, ARMS)
    report = dict(zip(ARMS, REPORTS, strict=True))
    tables, moved = update("reverse", game, report)
    pi_V = probabilities(tables, game.prompt(()), [0, 1, 2])
    target_V = torch.cat(
        [tables.log_probs("a", (*hinted(text), *words), [2]) for words, text in report.items()]
    )
    # E_y[log π(y) − log T(y|c(y))], where each T comes from another prompt.
    check_descends(tables, moved, (pi_V * (pi_V.log() - target_V.detach())).sum())


# -------- Contexts


def heard(*contents: str, speaker: str | None = None) -> tuple[Message, ...]:
    return tuple(Message("user", content, speaker) for content in contents)


ALONE = episode(turn("a", 0, text="no"), success=0.0, info={"explanations": {"a": "2 tests failed"}})
GOOD = episode(turn("a", 0, text="yes"), success=1.0)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (("sibling", "feedback"), "yes"),
        (("feedback", "sibling"), "2 tests failed"),
        (("solution", "feedback"), "42"),
    ],
)
def test_the_first_source_with_a_text_is_used(sources: tuple[str, ...], said: str) -> None:
    task = Task("t0", "?", {"answer": 42})
    both = group(replace(ALONE, task=task), replace(GOOD, task=task))
    found = context_of(both, 0, both.episodes[0].turns[0], sources, 1.0)
    assert found is not None
    assert said in found


def test_only_other_episodes_of_enough_success_are_siblings() -> None:
    assert context_of(group(ALONE, GOOD), 1, GOOD.turns[0], ("sibling",), 1.0) is None
    paid = replace(ALONE, success=None, rewards={"a": 0.7})
    assert context_of(group(GOOD, paid), 0, GOOD.turns[0], ("sibling",), 0.8) is None
    assert "no" in (context_of(group(GOOD, paid), 0, GOOD.turns[0], ("sibling",), 0.7) or "")
    failed = replace(GOOD, error="EpisodeError")
    assert context_of(group(ALONE, failed), 0, ALONE.turns[0], ("sibling",), 1.0) is None


def test_feedback_is_what_the_agent_reads_next_and_a_critique_what_another_one_writes_next() -> None:
    turns = [
        turn("solver", 0, text="first"),
        turn("critic", 1, text="<think>hm</think>wrong sign", thoughts=17),
        turn("solver", 2, text="second", new_messages=heard("Attempt 1 of 2 failed.")),
    ]
    found = group(episode(*turns, info={"explanations": "7 is correct"}))

    def context(number: int, source: str) -> str:
        return context_of(found, 0, turns[number], (source,), 1.0) or ""

    assert "Attempt 1 of 2 failed." in context(0, "feedback")
    assert "7 is correct" in context(2, "feedback")
    assert context(0, "critic").startswith("critic on an earlier answer to this task:\n\nwrong sign\n\n")
    assert context(2, "critic") == ""
    # A simultaneous turn has not read the answer.
    assert (
        context_of(
            group(episode(turns[0], replace(turns[1], completed_before=0))), 0, turns[0], ("critic",), 1.0
        )
        is None
    )


def test_prompts_end_with_the_context_and_keep_sampled_tokens() -> None:
    renderer = tiny_model().renderer
    context = Message("user", "the context")
    question, reply = heard("question"), heard("reply")
    first = turn("a", 0, prompt_ids=renderer.start(question), completion_ids=(70, 71), new_messages=question)
    # These tokens are not how the tokeniser would write their text.
    second = turn("a", 1, prompt_ids=renderer.extend(first.prompt_ids, (70, 71), reply), new_messages=reply)
    whole = episode(first, second)
    assert prompt_with(renderer, whole, first, context) == renderer.start([*question, context])
    longer = prompt_with(renderer, whole, second, context)
    assert longer[: len(first.prompt_ids) + 2] == (*first.prompt_ids, 70, 71)
    assert longer == renderer.extend(first.prompt_ids, (70, 71), [*reply, context])


class Scores:
    """A train engine that keeps what it scores."""

    def __init__(self, context: int) -> None:
        self.samples: list[Sample] = []
        self._reader = SimpleNamespace(context=context, start=lambda messages: (1, 2, 3, 4))

    def renderer(self, learner: str) -> Any:
        return self._reader

    def score(self, samples: list[Sample]) -> list[Tensor]:
        self.samples = samples
        return [torch.zeros(len(each.targets)) for each in samples]


def sampled(told: Turn) -> Sampled:
    return Sampled(1, [group(episode(told, info={"explanations": "no"}))], team_of("a"), list)


def test_the_targets_are_the_sampled_tokens_and_long_prompts_have_no_teacher() -> None:
    signal, told = SelfTeacherLogProbs(("feedback",), 1.0), turn("a", 0)
    engine: Any = Scores(context=6)
    assert list(signal.gather(sampled(told), engine)[SELF_TEACHER]) == [KEY]
    (sample,) = engine.samples
    assert [sample.tokens[k] for k in sample.targets] == [20, 21]
    short: Any = Scores(context=5)
    assert signal.gather(sampled(told), short)[SELF_TEACHER] == {}


# -------- Runs


def run_of(**algorithm: Any) -> Trainer:
    return Trainer(
        **sections(
            team={"agents": 2, "sharing": "lora", "sampling": {"max_tokens": 1}},
            workflow={"name": "parallel"},
            environment={"name": "experiments.relays:Explained", "letters": 2},
            algorithm={"name": "self_distill", **algorithm},
            optimizer={"lr": 1e-2},
            training={"steps": 4, "tasks_per_step": 2},
        )
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"context": ["agent_2"]}, "Did you mean 'agent_"),
        ({"context": ["sibling"], "group_size": 1}, "needs other episodes"),
    ],
)
def test_sources_that_cannot_exist_raise_an_error(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_of(**settings)


def test_a_language_model_is_taught_by_its_slow_copy() -> None:
    with run_of(context=["feedback"], reference_every=2) as trainer:
        rows = [step.metrics for step in trainer.steps()]
    for row in rows:
        assert row["taught_share/agent_0"] == 1.0
        assert math.isfinite(row["self_teacher_kl/agent_1"])


def test_a_team_learns_from_reports_what_its_reward_does_not_say() -> None:
    # The reward needs both letters; the report names each agent's own, which the start follows with probability 0.9.
    game = {"name": "experiments.relays:Explained", "letters": 3, "pays": "all"}
    algorithm = {"name": "self_distill", "context": ["feedback"]}
    recipe = recipe_of(game, Arm(algorithm), 8.0, 0, training={"tasks_per_step": 8})
    run = TableRun(recipe, lambda seen: {seen.split("\n\n")[1]: math.log(18.0)} if "Feedback" in seen else {})
    assert run.value == pytest.approx(1 / 9)
    _, first = run.step()
    for _ in range(25):
        run.step()
    assert run.value > 0.7
    assert run.last["self_teacher_kl/agent_0"] < first["self_teacher_kl/agent_0"] / 4
