"""What a run relies on in a rollout engine, asked of each as far as its protocol declares; `subjects.py` names them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.engines.rollout.subjects import KINDS, NAMES, POLICIES, Subject, bare, own_weights
from tests.engines.test_constraints import EVERY, YES_NO, legal
from tests.support.episodes import TASK
from tests.support.tiny import LORA, frozen_copy, stir
from torch import Tensor

from kapelle.engines.rollout.protocol import Completion, HeldRequest, Interruptible, Request, RolloutEngine
from kapelle.errors import ConfigError, EngineError
from kapelle.functional.masking import allowed_words
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import copy_weights
from kapelle.models.weights import weights_hash
from kapelle.runtime.event_loop import run_async
from kapelle.types import Constraint, Message, Sampling

PROMPT = (7, 100, 8, 33, 12)
"""Ids that no text becomes: whoever tokenises the conversation again samples after another prompt."""
WAYS = {
    "as it is": Sampling(max_tokens=6),
    "tempered": Sampling(max_tokens=6, temperature=0.7),
    "nucleus": Sampling(max_tokens=6, temperature=1.3, top_p=0.6),
    "few": Sampling(max_tokens=6, top_k=5),
    "both": Sampling(max_tokens=6, temperature=0.8, top_p=0.7, top_k=9),
    "greedy": Sampling(max_tokens=6, temperature=0.0),
}


def cases(names: Iterable[str], long: Container[str] = ()) -> list[object]:
    """Return engines as parameters; the `long` ones are left to `make test-long`."""
    marks = {name: (*KINDS[name].marks, *([pytest.mark.long] if name in long else [])) for name in names}
    return [pytest.param(name, marks=each) for name, each in marks.items()]


def asked_of(long: Container[str] = (), **declared: bool) -> pytest.MarkDecorator:
    """Ask a test of the engines that declare this."""
    names = [
        name
        for name, kind in KINDS.items()
        if all(getattr(kind, what) == value for what, value in declared.items())
    ]
    return pytest.mark.parametrize("subject", cases(names, long), indirect=True)


SGLANG = ("stand-in for an SGLang server",)
SAMPLERS = asked_of(SGLANG, samples=True)
WEIGHED = asked_of(weights=True)
CUTTING = asked_of(weights=True, cuts=True)


@pytest.fixture(params=cases(KINDS, SGLANG))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    made = KINDS[request.param].make()
    yield made
    made.engine.close()
    made.close()


@pytest.fixture
def engine(subject: Subject) -> RolloutEngine:
    return subject.engine


def ask_for(policy: str, seed: int = 0, sampling: Sampling | None = None, count: int = 6) -> Request:
    said = (Message("user", "what now?"),)
    return Request(policy, policy, said, PROMPT, sampling or Sampling(max_tokens=count), seed, TASK)


async def ask(engine: RolloutEngine, requests: Sequence[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def mixed(count: int = 9, sampling: Sampling | None = None) -> list[Request]:
    return [ask_for(NAMES[k % len(NAMES)], k, sampling) for k in range(count)]


def words(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.ids for completion in completions]


@cache
def judge(adapted: bool) -> LanguageModel:
    """Return a model of the tests' own: with adapters `a` and `b` on the base, or for weights of a whole base."""
    model = bare()
    for name in ("a", "b") if adapted else ():
        model.bank.add(name, LORA, 0)
    return model


def truth(policy: str, weights: Mapping[str, Tensor], request: Request, ids: Sequence[int]) -> Tensor:
    """Return the log-probs `_T` of sampled ids under what a request asks for, by `transformers` and the definitions."""
    adapter = next((p.name for p in POLICIES if p.name == policy and p.lora), None)
    model = judge(adapter is not None)
    if adapter is not None:
        model.bank.fill(policy, weights)
    else:
        copy_weights(model.base_parameters(), weights, "the base")
    tokens = torch.tensor([(*request.prompt_ids, *ids)])
    with torch.no_grad(), model.computing([(adapter, 0, 1)]):
        logits_LV = model.model(input_ids=tokens, use_cache=False).logits[0].double()
    asked, begin = request.sampling, len(request.prompt_ids) - 1
    if asked.constraint is not None:
        bits_TW = torch.from_numpy(model.masks.of(asked.constraint, tuple(ids)))
        allowed_TV = allowed_words(bits_TW, 0, logits_LV.shape[1])
        logits_LV[begin : begin + len(ids)].masked_fill_(~allowed_TV, -torch.inf)
    found = []
    for k, token in enumerate(ids):
        logits_V = logits_LV[begin + k] / (asked.temperature or 1.0)
        ranked = logits_V.softmax(-1).sort(descending=True)
        kept = len(logits_V) if not asked.top_k else asked.top_k
        share_K = ranked.values[:kept] / ranked.values[:kept].sum()
        if asked.top_p < 1:
            share_K = share_K[share_K.cumsum(-1) - share_K < asked.top_p]
            share_K = share_K / share_K.sum()
        place = ranked.indices.tolist().index(token)
        assert place < len(share_K), f"token {token} is not among those that may be sampled"
        if asked.temperature == 0:
            assert place == 0, "greedy is the most likely token"
        found.append(share_K[place].log())
    return torch.stack(found)


def assert_true(weights: Mapping[str, Mapping[str, Tensor]], request: Request, answer: Completion) -> None:
    expected_T = truth(request.policy, weights[request.policy], request, answer.ids)
    assert (expected_T - torch.tensor(answer.logprobs)).abs().max() <= 1e-4


class TestAnswers:
    def test_each_request_gets_its_own_answer(self, engine: RolloutEngine) -> None:
        requests = mixed()
        together = asyncio.run(ask(engine, requests))
        alone = [asyncio.run(ask(engine, [request]))[0] for request in requests]
        assert words(together) == words(alone)
        assert len(set(words(together))) > len(NAMES)
        for one, other in zip(together, alone, strict=True):
            assert (one.text, one.version, one.weights_hash) == (
                other.text,
                other.version,
                other.weights_hash,
            )
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)

    def test_every_token_has_a_log_prob_that_can_be_one(self, engine: RolloutEngine) -> None:
        for answer in asyncio.run(ask(engine, mixed())):
            assert len(answer.ids) == len(answer.logprobs) > 0
            assert all(logp <= 0 for logp in answer.logprobs)
            assert answer.finish_reason in ("stop", "length")

    def test_what_was_sampled_can_be_spoken_on(self, engine: RolloutEngine) -> None:
        for request, answer in zip(mixed(3), asyncio.run(ask(engine, mixed(3))), strict=True):
            renderer = engine.renderer(request.policy)
            longer = renderer.extend(request.prompt_ids, answer.ids, [Message("user", "and?")])
            assert longer[: len(PROMPT) + len(answer.ids)] == (*PROMPT, *answer.ids)

    @SAMPLERS
    def test_seeds_repeat_and_differ(self, engine: RolloutEngine) -> None:
        def drawn() -> list[tuple[int, ...]]:
            return words(asyncio.run(ask(engine, [ask_for("a", seed) for seed in (1, 2, 1 << 62)])))

        first = drawn()
        assert first == drawn()
        assert len(set(first)) == 3

    @SAMPLERS
    def test_a_limit_cuts_and_is_reported(self, engine: RolloutEngine) -> None:
        longer = asyncio.run(ask(engine, [ask_for("a", seed, count=30) for seed in range(8)]))
        cut = asyncio.run(ask(engine, [ask_for("a", seed, count=3) for seed in range(8)]))
        assert {len(answer.ids) for answer in cut} <= {1, 2, 3}
        for short, long in zip(cut, longer, strict=True):
            if len(long.ids) > 3:
                assert (short.ids, short.finish_reason) == (long.ids[:3], "length")
        assert any(len(long.ids) > 3 for long in longer)

    @SAMPLERS
    def test_a_stop_ends_the_text_before_it(self, engine: RolloutEngine) -> None:
        free = asyncio.run(ask(engine, [ask_for("b", seed, count=30) for seed in range(8)]))
        letter = next(c for answer in free for c in answer.text[3:-3] if c.isascii() and c.isalpha())
        sampling = Sampling(max_tokens=30, stop=(letter, "never said"))
        stopped = asyncio.run(ask(engine, [ask_for("b", seed, sampling) for seed in range(8)]))
        assert any(letter in answer.text for answer in free)
        for one, other in zip(stopped, free, strict=True):
            assert one.text == other.text.partition(letter)[0]
            assert one.ids == other.ids[: len(one.ids)]
            if letter in other.text:
                assert one.finish_reason == "stop"


@asked_of(weights=True, cuts=False)
class TestTemperedDistributions:
    """Of engines whose log-probs know no top-k and top-p."""

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("way", ["as it is", "tempered", "greedy"])
    def test_log_probs_are_of_the_sampling_distribution(self, engine: RolloutEngine, way: str) -> None:
        requests = mixed(6, WAYS[way])
        for request, answer in zip(requests, asyncio.run(ask(engine, requests)), strict=True):
            assert_true(own_weights(), request, answer)

    def test_an_invalid_top_k_fails_only_its_request(self, engine: RolloutEngine) -> None:
        async def both() -> list[Completion | BaseException]:
            asked = [ask_for("a", 0), ask_for("a", 1, WAYS["nucleus"]), ask_for("a", 2, WAYS["few"])]
            return await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)

        answer, *refused = asyncio.run(both())
        assert isinstance(answer, Completion)
        for each in refused:
            assert isinstance(each, EngineError)
            assert "`top_p: 1` and `top_k: 0`" in str(each)


class TestDistributions:
    @CUTTING
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("way", WAYS)
    def test_log_probs_are_of_the_sampling_distribution(self, engine: RolloutEngine, way: str) -> None:
        requests = mixed(6, WAYS[way])
        for request, answer in zip(requests, asyncio.run(ask(engine, requests)), strict=True):
            assert_true(own_weights(), request, answer)

    @CUTTING
    def test_every_row_has_its_own_way_of_sampling(self, engine: RolloutEngine) -> None:
        requests = [ask_for(NAMES[k % 3], k, sampling) for k, sampling in enumerate(WAYS.values())]
        for request, answer in zip(requests, asyncio.run(ask(engine, requests)), strict=True):
            assert_true(own_weights(), request, answer)

    @asked_of(("stand-in for vllm", "stand-in for a vllm server"), weights=True, cuts=True)
    def test_tokens_come_as_often_as_their_log_probs_say(self, engine: RolloutEngine) -> None:
        requests = [ask_for("a", seed, Sampling(max_tokens=1, top_k=3)) for seed in range(300)]
        answers = asyncio.run(ask(engine, requests))
        said = {answer.ids: answer.logprobs[0] for answer in answers}
        assert sum(torch.tensor(list(said.values())).exp().tolist()) == pytest.approx(1.0, abs=1e-4)
        for ids, logp in said.items():
            share = sum(answer.ids == ids for answer in answers) / len(answers)
            assert share == pytest.approx(float(torch.tensor(logp).exp()), abs=0.12)  # 4 standard deviations


@asked_of(holds=True)
class TestForms:
    """Completions of a given form, from several adapters and their base."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("llguidance")

    def test_log_probs_are_over_the_allowed_tokens(self, engine: RolloutEngine) -> None:
        """Every form sampled in every way, in one batch."""
        asked = [
            (kind, replace(way, max_tokens=40, constraint=form))
            for way in WAYS.values()
            for kind, form in (*EVERY.items(), ("free", None))
        ]
        requests = [ask_for(NAMES[k % 3], k, sampling) for k, (_, sampling) in enumerate(asked)]
        ended = 0
        for (kind, sampling), request, answer in zip(
            asked, requests, asyncio.run(ask(engine, requests)), strict=True
        ):
            assert answer.constraint == sampling.constraint
            assert_true(own_weights(), request, answer)
            if sampling.constraint is not None and answer.finish_reason == "stop":
                ended += 1
                assert legal(kind, answer.text)
        assert ended >= 12

    def test_a_rejected_form_fails_only_its_request(self, engine: RolloutEngine) -> None:
        async def both() -> list[Completion | BaseException]:
            forms = (YES_NO, Constraint.regex("(yes"))
            asked = [ask_for("a", 0, Sampling(constraint=form)) for form in forms]
            return await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)

        answer, refused = asyncio.run(both())
        assert isinstance(answer, Completion)
        assert legal("choices", answer.text)
        assert isinstance(refused, ConfigError)
        assert "unclosed group" in str(refused)


@WEIGHED
class TestWeights:
    @pytest.mark.sample(2)
    def test_published_weights_are_used_only_by_their_agent(self, engine: RolloutEngine) -> None:
        weights = own_weights()
        before = asyncio.run(ask(engine, mixed()))
        for version, seed in ((1, 71), (4, 72)):
            drawn = frozen_copy(weights["b"])
            stir(drawn, seed)
            weights["b"] = drawn
            engine.load("b", drawn, version)
            requests = mixed()
            after = asyncio.run(ask(engine, requests))
            for request, old, new in zip(requests, before, after, strict=True):
                assert_true(weights, request, new)
                if request.policy == "b":
                    assert (new.version, new.weights_hash) == (version, weights_hash(drawn))
                else:
                    assert (new.ids, new.weights_hash, new.version) == (old.ids, old.weights_hash, 0)
            theirs = [k for k, request in enumerate(requests) if request.policy == "b"]
            assert [after[k].ids for k in theirs] != [before[k].ids for k in theirs]

    def test_one_prompt_is_read_again_after_a_publish(self, engine: RolloutEngine) -> None:
        """What an engine keeps of prompts belongs to the weights that read them."""
        weights = own_weights()
        asked = replace(ask_for("a", 3), prompt_ids=tuple(range(10, 80)))
        for seed in (81, 82):
            (answer,) = asyncio.run(ask(engine, [asked]))
            assert_true(weights, asked, answer)
            weights["a"] = frozen_copy(weights["a"])
            stir(weights["a"], seed)
            engine.load("a", weights["a"], seed)

    def test_weights_of_a_base_are_used_by_those_without_an_adapter(self, engine: RolloutEngine) -> None:
        drawn = {key: tensor * 0.5 for key, tensor in frozen_copy(own_weights()["still"]).items()}
        before = asyncio.run(ask(engine, [ask_for("still", k) for k in range(4)]))
        engine.load("still", drawn, 2)
        after = asyncio.run(ask(engine, [ask_for("still", k) for k in range(4)]))
        assert words(after) != words(before)
        for k, answer in enumerate(after):
            assert_true({"still": drawn}, ask_for("still", k), answer)
        assert {(answer.version, answer.weights_hash) for answer in after} == {(2, weights_hash(drawn))}

    def test_what_does_not_fit_is_rejected_and_nothing_moves(self, engine: RolloutEngine) -> None:
        before = asyncio.run(ask(engine, mixed()))
        weights = dict(own_weights()["a"])
        first = next(iter(weights))
        for wrong in ({k: v for k, v in weights.items() if k != first}, {**weights, first: torch.zeros(1)}):
            with pytest.raises(EngineError, match="fit"):
                engine.load("a", wrong, 9)
        assert asyncio.run(ask(engine, mixed())) == before

    def test_released_caches_change_no_answer(self, engine: RolloutEngine) -> None:
        before = asyncio.run(ask(engine, mixed()))
        engine.release_caches()
        assert words(asyncio.run(ask(engine, mixed()))) == words(before)


async def with_a_hold(
    engine: RolloutEngine, requests: Sequence[Request], load: Callable[[], None]
) -> tuple[dict[int, HeldRequest], list[Completion]]:
    """Put the requests on hold when the first one is complete; return those on hold and all completions."""
    assert isinstance(engine, Interruptible)
    engine.run_freely()
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    held = {id(each.request): each for each in await engine.hold()}
    assert {id(r) for r, task in zip(requests, tasks, strict=True) if not task.done()} == set(held)
    load()
    engine.resume()
    return held, await asyncio.gather(*tasks)


def requests_to_hold() -> list[Request]:
    ways = (Sampling(max_tokens=90), Sampling(max_tokens=90, temperature=0.7, top_p=0.9))
    return [
        *(ask_for("a", k, count=3) for k in range(4)),  # a quarter: so many are answered at once
        *(ask_for(NAMES[k % 3], k, ways[k % 2]) for k in range(1, 10)),
    ]


@asked_of(repeats=True)
def test_a_hold_changes_nothing(engine: RolloutEngine) -> None:
    requests = requests_to_hold()
    whole = asyncio.run(ask(engine, requests))
    held, found = asyncio.run(with_a_hold(engine, requests, lambda: None))
    assert sum(len(each.ids) > 0 for each in held.values()) > 4
    for request, completion, expected in zip(requests, found, whole, strict=True):
        before = held.get(id(request))
        if before is not None:
            assert completion.ids[: len(before.ids)] == before.ids
            assert completion.logprobs[: len(before.ids)] == before.logprobs
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert replace(completion, logprobs=()) == replace(expected, logprobs=())


@asked_of(breaks_off=True)
class TestOnHold:
    """Requests that continue after a publish: every token has the log-prob of the weights that sampled it."""

    def test_later_tokens_use_the_new_weights_for_the_whole_text(self, engine: RolloutEngine) -> None:
        weights = own_weights()
        drawn = frozen_copy(weights["a"])
        stir(drawn, 71)
        requests = requests_to_hold()
        held, found = asyncio.run(with_a_hold(engine, requests, lambda: engine.load("a", drawn, 5)))
        mixed = 0
        for request, completion in zip(requests, found, strict=True):
            first = held.get(id(request))
            if first is None or request.policy != "a":
                assert completion.runs == ()
                continue
            count, mixed = len(first.ids), mixed + (len(first.ids) > 0)
            assert first.runs == (((0, count),) if count else ())
            assert completion.version == 5
            assert completion.runs == (((0, count), (5, len(completion.ids) - count)) if count else ())
            assert completion.weights_hash == weights_hash(drawn)
            before = truth("a", weights["a"], request, first.ids)
            whole = replace(request, prompt_ids=(*request.prompt_ids, *first.ids))
            after = truth("a", drawn, whole, completion.ids[count:])
            sampled = torch.tensor(completion.logprobs)
            assert (torch.cat((before, after)) - sampled).abs().max() <= 1e-4
        assert mixed > 0

    def test_a_failure_reaches_all_requests_and_the_caller(
        self, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert isinstance(engine, Interruptible)
        engine.run_freely()

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        async def broken() -> list[Completion | BaseException]:
            tasks = [asyncio.create_task(engine.generate(request)) for request in requests_to_hold()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            monkeypatch.setattr(engine, "_hold", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                await engine.hold()
            monkeypatch.undo()
            return await asyncio.gather(*tasks, return_exceptions=True)

        assert any(isinstance(each, EngineError) for each in asyncio.run(broken()))
        assert len(asyncio.run(ask(engine, mixed()))) == len(mixed())

    def test_without_requests_nothing_is_on_hold(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, Interruptible)
        engine.run_freely()

        async def hold() -> list[HeldRequest]:
            held = list(await engine.hold())
            engine.resume()
            return held

        assert run_async(hold) == []
        before = asyncio.run(ask(engine, mixed()))
        assert run_async(hold) == []
        assert asyncio.run(ask(engine, mixed())) == before


class TestFaults:
    @pytest.mark.sample(3)
    def test_a_failure_reaches_all_requests_and_the_engine_continues(self, subject: Subject) -> None:
        before = asyncio.run(ask(subject.engine, mixed(6)))

        async def all_of() -> list[Completion | BaseException]:
            return await asyncio.gather(
                *(subject.engine.generate(request) for request in mixed(6)), return_exceptions=True
            )

        with subject.breaking():
            found = asyncio.run(all_of())
        assert len(found) == 6
        assert all(isinstance(each, Exception) for each in found)
        assert words(asyncio.run(ask(subject.engine, mixed(6)))) == words(before)

    @pytest.mark.sample(3)
    def test_a_cancelled_request_does_not_disturb_others(self, engine: RolloutEngine) -> None:
        expected = words(asyncio.run(ask(engine, mixed())))

        async def some_leave() -> list[Completion]:
            tasks = [asyncio.create_task(engine.generate(request)) for request in mixed()]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            return [each for k, each in enumerate(done) if k % 3 and isinstance(each, Completion)]

        assert words(asyncio.run(some_leave())) == [ids for k, ids in enumerate(expected) if k % 3]
        assert words(asyncio.run(ask(engine, mixed()))) == expected

    def test_requests_of_an_interrupted_run_are_dropped(self, engine: RolloutEngine) -> None:
        expected = words(asyncio.run(ask(engine, mixed())))

        async def broken_off() -> None:
            async def fault() -> None:
                raise KeyError("elsewhere")

            await asyncio.gather(fault(), *(engine.generate(request) for request in mixed()))

        with pytest.raises(KeyError):
            asyncio.run(broken_off())
        assert words(asyncio.run(ask(engine, mixed()))) == expected
