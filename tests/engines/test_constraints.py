"""Constrained completions: what is sampled, with which log-probs, and the gradient that training takes of them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from tests.support.tiny import LORA, tiny_model, train_engine
from torch import Tensor

from kapelle.algorithm import Outputs, Targets
from kapelle.engines.rollout.local.decode_batch import Decoder, decode
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.train.protocol import Objective
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.errors import ParityError
from kapelle.models.language_model import LanguageModel
from kapelle.models.token_masks import TokenMasks
from kapelle.rows import Column, Sample
from kapelle.team import Policy
from kapelle.types import Constraint, Message, Sampling, Task

YES_NO = Constraint.choices(["yes", "no", "nobody"])
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Köln"]}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}
EVERY = {
    "choices": YES_NO,
    "regex": Constraint.regex("[ab]{2,5}/€"),
    "schema": Constraint.json_schema(SCHEMA),
    "grammar": Constraint.grammar('start: "(" start ")" | "x"'),
}


def job(model: LanguageModel, said: str, seed: int, **sampling: object) -> Job:
    prompt = model.renderer.start([Message("user", said)])
    return Job(None, prompt, Sampling(**{"max_tokens": 60, **sampling}), seed)  # type: ignore[arg-type]


def text_of(model: LanguageModel, output: RowOutput) -> str:
    return model.renderer.spoken(output.ids)


def legal(kind: str, text: str) -> bool:
    if kind == "choices":
        return text in ("yes", "no", "nobody")
    if kind == "regex":
        head, _, tail = text.partition("/")
        return 2 <= len(head) <= 5 and set(head) <= {"a", "b"} and tail == "€"
    if kind == "grammar":
        depth = text.count("(")
        return text == "(" * depth + "x" + ")" * depth
    found = json.loads(text)
    return (
        found.keys() == {"city", "sure"} and found["city"] in ("Bern", "Köln") and type(found["sure"]) is bool
    )


def finish(decoder: Decoder) -> None:
    while decoder.in_flight:
        decoder.advance(1)


def test_forced_tokens_of_a_choice_are_written_without_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens and log-probs, in fewer steps; later prompts continue what was read alone."""

    def played(model: LanguageModel) -> tuple[list[RowOutput], int]:
        first = [job(model, "?", seed, constraint=YES_NO) for seed in range(12)]
        rest = [
            *[job(model, "?", seed, constraint=YES_NO, max_tokens=2) for seed in range(12)],
            *[job(model, "?", seed, constraint=YES_NO, stop=("e",)) for seed in range(12)],
            job(model, "?", 3, constraint=EVERY["regex"]),
            job(model, "?", 4, max_tokens=20),
        ]
        decoder = Decoder(model, kept_tokens=10_000)
        outputs = decoder.join(first)
        finish(decoder)
        steps = decoder.steps
        again = [
            own._replace(prompt=(*own.prompt, *output.ids), seed=99)
            for own, output in zip(first, outputs, strict=True)
        ]
        for each in (again, rest):
            outputs += decoder.join(each)
            finish(decoder)
        return outputs, steps

    found, steps = played(tiny_model())
    monkeypatch.setattr(TokenMasks, "ending", lambda *_: ())
    expected, all_steps = played(tiny_model())
    assert [(each.ids, each.finish_reason, each.text) for each in found] == [
        (each.ids, each.finish_reason, each.text) for each in expected
    ]
    for own, other in zip(found, expected, strict=True):
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert steps <= 3 < all_steps, "a byte or two tell yes, no and nobody apart"


@pytest.mark.parametrize("kind", EVERY)
def test_a_completed_text_matches_its_constraint(kind: str) -> None:
    model = tiny_model()
    outputs = decode(model, [job(model, "?", seed, constraint=EVERY[kind]) for seed in range(24)])
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert len(ended) >= 12
    assert all(legal(kind, text_of(model, output)) for output in ended)
    assert len({text_of(model, output) for output in ended}) > 1, "or sampling is forced"


def test_rows_without_a_constraint_are_bitwise_unaffected() -> None:
    model = tiny_model()
    free = [job(model, said, seed) for seed, said in enumerate(("a", "bc", "def"))]
    alone = decode(model, free)
    among = decode(model, [*free, *(job(model, "?", seed, constraint=YES_NO) for seed in range(3))])[:3]
    # Another number of rows is another matrix product: the same rows with and without the others' constraints.
    others = decode(model, [*free, *(job(model, "?", seed) for seed in range(3))])[:3]
    shortest = min(
        len(output.ids)
        for output in decode(model, [job(model, "?", seed, constraint=YES_NO) for seed in range(3)])
    )
    for each, with_others, own in zip(among, others, alone, strict=True):
        assert each.ids == with_others.ids == own.ids
        assert each.logprobs[:shortest] == with_others.logprobs[:shortest]


def byte_id(model: LanguageModel, byte: int) -> int:
    [found] = model.renderer._ids(chr(byte))
    return found


# -------- The engine: what is begun, kept and interrupted


def policy_of(name: str = "p", *, trained: bool = True) -> Policy:
    return Policy(name, "base", lora=LORA, trained=trained)


def asked(model: LanguageModel, sampling: Sampling, seed: int = 0, begun: tuple[int, ...] = ()) -> Request:
    said = (Message("user", "?"),)
    return Request("p", "a", said, model.renderer.start(said), sampling, seed, Task("t", "?"), begun=begun)


def answers(engine: LocalEngine, *requests: Request) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("constraint", "most", "cut_short"),
    [(EVERY["schema"], 60, False), (Constraint.choices(["yes"]), 3, True)],
    ids=["", "a forced ending that exceeds the limit"],
)
def test_an_interrupted_completion_continues_at_its_place(
    constraint: Constraint, most: int, cut_short: bool
) -> None:
    model = tiny_model()
    model.bank.add("p", LORA, 0)
    engine = LocalEngine({"base": model}, [policy_of()])
    sampling = Sampling(max_tokens=most, constraint=constraint)
    [whole] = answers(engine, asked(model, sampling, seed=5))
    assert (whole.finish_reason == "length") == cut_short
    for cut in range(1, len(whole.ids)):
        [rest] = answers(engine, asked(model, sampling, seed=5, begun=whole.ids[:cut]))
        assert rest.ids == whole.ids[cut:]
        assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-5)
        assert rest.text == whole.text


def test_alternatives_are_those_that_were_allowed() -> None:
    model = tiny_model()
    model.bank.add("p", LORA, 0)
    engine = LocalEngine({"base": model}, [policy_of()])
    request = asked(model, Sampling(constraint=YES_NO))
    [answer] = answers(engine, request)
    first, *_ = engine.alternatives(request, answer.ids, 20)
    assert {token for token, _ in first} == {byte_id(model, byte) for byte in b"yn"}
    assert sum(math.exp(logp) for _, logp in first) == pytest.approx(1.0, abs=1e-5)


# -------- Training


def samples_of(
    model: LanguageModel, outputs: Sequence[RowOutput], jobs: Sequence[Job], learner: str
) -> list[Sample]:
    rows = []
    for output, each in zip(outputs, jobs, strict=True):
        tokens = (*each.prompt, *output.ids)
        rows.append(
            Sample(
                learner,
                tokens,
                tuple(range(len(each.prompt), len(tokens))),
                {Column.BEHAVIOUR: torch.tensor(output.logprobs)},
                temperature=each.sampling.temperature,
                constraint=each.sampling.constraint,
                begin=len(each.prompt),
            )
        )
    return rows


def test_the_trainer_scores_sampled_completions() -> None:
    engine = train_engine([policy_of()])
    model = engine.model_of("p")
    jobs = [
        job(model, "?" * (1 + seed % 2), seed, constraint=constraint, temperature=0.8)._replace(adapter="p")
        for seed, constraint in enumerate([*EVERY.values(), None, None] * 3)
    ]
    samples = samples_of(model, decode(model, jobs), jobs, "p")
    parts = [  # tokens that other weights sampled before are omitted
        replace(
            each, targets=each.targets[1:], columns={Column.BEHAVIOUR: each.columns[Column.BEHAVIOUR][1:]}
        )
        for each in samples
    ]
    gap = engine.check_parity([*samples, *parts])
    assert max(value for name, value in gap.items() if "max" in name or "gap" in name) < 1e-4
    with pytest.raises(ParityError, match="from another distribution"):
        engine.check_parity([replace(sample, constraint=None) for sample in samples])


def test_the_expected_gradient_is_that_of_the_expected_return() -> None:
    """Σ p(y) R(y) ∇ log p(y) over every completion that is allowed, as the engine computes it, against ∇ Σ p(y) R(y).

    Without the trainer's masks the same sum has another direction: probability flows to what cannot be sampled.
    """
    texts = ["a", "ab", "ba", "bb", "c"]
    constraint, returns = Constraint.choices(texts), [1.0, -0.5, 2.0, 0.25, -1.0]
    exact, masked, unmasked = gradients(constraint, texts, returns)
    for name, expected in exact.items():
        torch.testing.assert_close(masked[name], expected, rtol=1e-4, atol=1e-5)
    assert cosine(masked, exact) > 1 - 1e-6
    assert cosine(unmasked, exact) < 0.9


def cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    a, b = (torch.cat([each[name].flatten() for name in sorted(each)]) for each in (one, other))
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


def gradients(
    constraint: Constraint,
    texts: Sequence[str],
    returns: Sequence[float],
    engine: TorchTrainEngine | None = None,
    sampled: Mapping[tuple[int, ...], float] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient of the expected return, and the expectation of the engine's own with and without masks.

    `sampled` are the log-probs of completions as a sampler says them; without it they are the exact ones.
    """
    engine = engine or train_engine([policy_of()])
    model = engine.model_of("p")
    prompt = model.renderer.start([Message("user", "?")])
    words = [model.renderer.completion(text) for text in texts]
    weights = engine.learners["p"].parameters

    # The exact one, from the model's own logits: at each place softmax over the tokens with which some text continues.
    def log_prob(ids: tuple[int, ...]) -> Tensor:
        total = torch.zeros(())
        for place, token in enumerate(ids):
            follow = sorted({word[place] for word in words if word[:place] == ids[:place]})
            with model.computing([("p", 0, len(prompt) + place)]):
                logits_V = model.model(torch.tensor([[*prompt, *ids[:place]]])).logits[0, -1]
            total = total + torch.log_softmax(logits_V[follow], 0)[follow.index(token)]
        return total

    logps = torch.stack([log_prob(word) for word in words])
    assert logps.exp().sum().item() == pytest.approx(1.0, abs=1e-5), "these are all completions"
    expected = (logps.exp() * torch.tensor(returns)).sum()
    exact = dict(zip(weights, torch.autograd.grad(expected, list(weights.values())), strict=True))

    said = logps.detach() if sampled is None else torch.tensor([sampled[word] for word in words])

    # The engine's: each completion as a sample, weighed by its probability times its return.
    def of_engine(asked_for: Constraint | None) -> dict[str, Tensor]:
        samples = [
            Sample(
                "p",
                (*prompt, *word),
                tuple(range(len(prompt), len(prompt) + len(word))),
                {Column.WEIGHT: torch.full((len(word),), logp.exp().item() * paid)},
                constraint=asked_for,
                begin=len(prompt),
            )
            for word, logp, paid in zip(words, said, returns, strict=True)
        ]

        def loss(outputs: Outputs, targets: Targets) -> object:
            from kapelle.algorithm import Loss

            return Loss((outputs.logp_K * targets[Column.WEIGHT]).sum(), torch.tensor(1.0), {})

        engine.accumulate(Objective(loss, parity=False), False, samples)  # type: ignore[arg-type]
        return {name: tensor.grad.clone() for name, tensor in weights.items() if tensor.grad is not None}

    return exact, of_engine(constraint), of_engine(None)
