"""What the engine keeps away from vLLM, on a substitute that makes vLLM's mistakes; the contract is asked of it too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engines.rollout.subjects import POLICIES, bare, base, own_weights
from tests.engines.rollout.vllm.stand_in import Substitute, TakesInPlace
from tests.support.episodes import TASK
from tests.support.tiny import LORA, SIZE, frozen_copy, same_bits, sections, stir
from torch import Tensor

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.vllm import settings
from kapelle.engines.rollout.vllm.engine import VllmEngine, base_model
from kapelle.engines.rollout.vllm.sampler import AdapterFile, BaseModel, arguments, start_in_process
from kapelle.engines.rollout.vllm.settings import Vllm
from kapelle.errors import EngineError, ParityError
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.models.lora_bank import copy_weights
from kapelle.models.weights import weights_hash
from kapelle.settings.schema import EmbeddedConfig
from kapelle.setup.recipe import load_recipe, resolve
from kapelle.team import Policy
from kapelle.training.trainer import Trainer
from kapelle.types import Sampling


class Started:
    """Keeps the substitutes that an engine starts."""

    def __init__(self) -> None:
        self.all: list[Substitute] = []
        self.refuses = False

    def __call__(self, about: BaseModel) -> Substitute:
        if self.refuses:
            raise EngineError("vLLM did not start.")
        self.all.append(Substitute(about))
        return self.all[-1]

    @property
    def last(self) -> Substitute:
        return self.all[-1]


@pytest.fixture
def started() -> Started:
    return Started()


@pytest.fixture
def engine(started: Started, tmp_path: Path) -> Iterator[VllmEngine]:
    made = VllmEngine({"base": base()}, POLICIES, started, tmp_path / "files")
    yield made
    made.close()


def asked(policy: str, seed: int = 0, tokens: int = 4, prompt: Sequence[int] = (7, 8, 9)) -> Request:
    return Request(policy, policy, (), tuple(prompt), Sampling(max_tokens=tokens), seed, TASK)


def ask(engine: VllmEngine, requests: Sequence[Request]) -> list[Completion]:
    async def all_of() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

    return asyncio.run(all_of())


def drawn(policy: str, seed: int) -> dict[str, Tensor]:
    weights = frozen_copy(own_weights()[policy])
    stir(weights, seed)
    return weights


class TestBatches:
    def test_every_request_is_answered_while_others_continue(self, engine: VllmEngine) -> None:
        order: list[str] = []

        async def speaker(policy: str, turns: int) -> None:
            for turn in range(turns):
                await engine.generate(asked(policy, turn, 3))
                order.append(policy)

        async def all_of() -> None:
            await asyncio.gather(speaker("a", 6), speaker("b", 6), speaker("still", 1))

        asyncio.run(all_of())
        assert order.index("still") < 5

    def test_a_prompt_that_does_not_fit_fails_alone(self, engine: VllmEngine) -> None:
        async def both() -> tuple[Completion | BaseException, Completion | BaseException]:
            long = asked("a", 1, prompt=range(300))
            return await asyncio.gather(
                engine.generate(long), engine.generate(asked("a")), return_exceptions=True
            )

        refused, answered = asyncio.run(both())
        assert isinstance(refused, EngineError)
        assert "longer" in str(refused)
        assert isinstance(answered, Completion)


def test_a_stop_string_that_begins_before_a_hold_ends_the_completion(engine: VllmEngine) -> None:
    """The sampler is asked for tokens after the hold alone, so it cannot find such a stop string."""
    decode = engine.renderer("a").decode

    async def on_hold(stop: Sequence[str], known: int) -> tuple[Completion, int]:
        engine.run_freely()
        request = replace(asked("a", 5, 80), sampling=Sampling(max_tokens=80, stop=tuple(stop)))
        task = asyncio.create_task(engine.generate(request))
        while True:  # until some tokens have been sampled
            for _ in range(12):  # iterations of the event loop, in which the engine samples once
                await asyncio.sleep(0)
            [held] = await engine.hold()
            if len(held.ids) >= known:
                engine.resume()
                return await task, len(held.ids)
            engine.resume()

    completion, count = asyncio.run(on_hold((), 1))
    assert 0 < count < len(completion.ids) == 80
    stop = decode(completion.ids[count - 1 : count + 1])
    assert stop not in decode(completion.ids[:count])
    ended, _ = asyncio.run(on_hold((stop,), 1))
    assert ended.ids == completion.ids[: count + 1]
    assert (ended.finish_reason, ended.text) == ("stop", decode(ended.ids).partition(stop)[0])


class TestPublishing:
    def test_prefixes_are_forgotten_and_old_files_go(
        self, engine: VllmEngine, started: Started, tmp_path: Path
    ) -> None:
        before = {file.name for file in (tmp_path / "files").iterdir()}
        engine.load("b", drawn("b", 5), 1)
        after = {file.name for file in (tmp_path / "files").iterdir()}
        assert started.last.calls == ["forget"]
        assert len(after) == len(before)
        assert len(after - before) == 1

    def test_names_are_safe_in_a_path(self, started: Started, tmp_path: Path) -> None:
        model = bare()
        model.bank.add("a/b c", LORA, 0)
        engine = VllmEngine({"base": model}, [Policy("a/b c", lora=LORA)], started, tmp_path / "files")
        ask(engine, [asked("a/b c")])
        (name,) = started.last.batches[0]
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz_-0123456789")
        engine.close()


class TestPublishingInPlace:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Callable[..., tuple[VllmEngine, list[TakesInPlace], LanguageModel]]:
        """Makes an engine that samples with a base alone, which is trained."""

        def make(workers: int = 1, **given: bool) -> tuple[VllmEngine, list[TakesInPlace], LanguageModel]:
            all_of: list[TakesInPlace] = []

            def start(about: BaseModel) -> TakesInPlace:
                all_of.append(TakesInPlace(about))
                all_of[-1].workers = workers
                return all_of[-1]

            model = bare()
            return VllmEngine({"base": model}, [WHOLE], start, tmp_path / "files", **given), all_of, model

        return make

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_running_vllm_continues_with_the_new_weights(
        self, made: Made, tmp_path: Path, workers: int
    ) -> None:
        engine, started, _ = made(workers)
        (before,) = ask(engine, [asked("whole")])
        new = halved()
        engine.load("whole", new, 3)
        (after,) = ask(engine, [asked("whole")])
        assert len(started) == 1
        assert started[0].calls[0] == "take"
        assert (after.version, after.weights_hash) == (3, weights_hash(new))
        assert same_bits(dict(started[0].model.base_parameters()), new)
        assert before.logprobs != after.logprobs
        assert len(list((tmp_path / "files").iterdir())) == 1, "old files go"

    @pytest.mark.parametrize("live", [True, False], ids=["the trainer's own", "copies"])
    def test_one_that_breaks_later_is_started_on_the_newest(self, made: Made, live: bool) -> None:
        engine, started, model = made()
        new = halved()
        if live:
            copy_weights(model.base_parameters(), new, "the trainer")
        engine.load("whole", model.base_parameters() if live else new, 1)
        started[0].broken = True
        with pytest.raises(EngineError, match="out of memory"):
            ask(engine, [asked("whole")])
        (answer,) = ask(engine, [asked("whole")])
        assert len(started) == 2
        assert same_bits(dict(started[1].model.base_parameters()), new)
        assert answer.weights_hash == weights_hash(new)

    def test_where_it_fails_vllm_is_started_again_and_that_is_reported_once(
        self, made: Made, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine, started, _ = made()
        started[0].fails = True
        for version in (1, 2):
            engine.load("whole", halved(), version)
        assert len(started) == 3
        assert [one.calls for one in started[:2]] == [["take", "close"], ["close"]]
        assert same_bits(dict(started[2].model.base_parameters()), halved())
        assert [text for text in caplog.messages if "no such method" in text] == caplog.messages
        assert len(caplog.messages) == 1


def halved() -> dict[str, Tensor]:
    return {name: 0.5 * tensor.detach() for name, tensor in bare().base_parameters().items()}


WHOLE = Policy("whole")


Made = Callable[..., tuple[VllmEngine, list[TakesInPlace], LanguageModel]]


class TestMemory:
    """What vLLM is given of a GPU, on numbers that a GPU might say."""

    ABOUT = BaseModel("m", "bfloat16", 4096, (1,), 0, 0, share=0.5, kept_free=10 << 30)

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (60 << 30, 80 << 30))

    def test_it_uses_a_share_of_the_memory_that_the_trainer_does_not_need(self, gpu: None) -> None:
        given = arguments(None, 256, {}, self.ABOUT)
        assert given["gpu_memory_utilization"] == pytest.approx((0.9 * 0.5 * 60 - 10) / 80)
        assert "kv_cache_memory_bytes" not in given

    @pytest.mark.parametrize(
        ("trained_on", "workers", "sleeps"),
        [((), 1, False), ((0,), 1, True), ((1,), 1, False), ((1, 3), 2, True)],
    )
    def test_it_sleeps_where_it_shares_a_gpu(
        self, trained_on: tuple[int, ...], workers: int, sleeps: bool
    ) -> None:
        about = replace(self.ABOUT, trained_on=trained_on)
        assert arguments(1.0, 1, {"tensor_parallel_size": workers}, about)["enable_sleep_mode"] == sleeps

    def test_several_bases_share_it_and_learners_keep_theirs(self, tmp_path: Path) -> None:
        started: list[BaseModel] = []

        def start(about: BaseModel) -> Substitute:
            started.append(about)
            return Substitute(about)

        one, two = bare(), bare()
        one.bank.add("a", LORA, 0)
        policies = [Policy("a", base="one", lora=LORA), Policy("b", base="two")]
        engine = VllmEngine({"one": one, "two": two}, policies, start, tmp_path / "files")
        assert [about.share for about in started] == [1 / 2, 1]
        adapter, whole = (
            sum(tensor.numel() for tensor in weights.values())
            for weights in (one.bank.parameters("a"), two.base_parameters())
        )
        assert [about.kept_free for about in started] == [12 * adapter, 12 * whole]
        engine.close()


class TestVersions:
    def test_heads_that_vllm_computes_on_no_cpu_are_rejected_before_it_starts(self, tmp_path: Path) -> None:
        """The recipe `kuhn_league` has such heads."""
        config = load_recipe("kuhn_league").config.model
        model = load_language_model(config)
        about = base_model(model, "embedded", [])
        with pytest.raises(EngineError, match=r"heads of size 16.*on a CPU needs 32 or more.*heads: 2"):
            start_in_process(1.0, 8, {}, about)
        two = config.model_copy(update={"embedded": EmbeddedConfig(hidden=64, heads=2, kv_heads=1)})
        assert arguments(1.0, 8, {}, base_model(load_language_model(two), "embedded", []))

    @pytest.mark.parametrize("name", ["trust_remote_code", "load_format", "worker_cls", "logits_processors"])
    def test_arguments_that_run_code_are_rejected(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"`{name}`"):
            Vllm(options={name: "mine"})


def spoiled(how: str) -> type[Substitute]:
    """Return a substitute that samples with other weights than it was given."""

    class Spoiled(Substitute):
        def __init__(self, about: BaseModel) -> None:
            super().__init__(about)
            self.first: dict[str, AdapterFile] = {}

        def _adapter(self, row, joining):  # type: ignore[no-untyped-def]
            assert row.adapter is not None
            if how == "an adapter is ignored":
                return None
            if how == "a version is stale":
                row = replace(row, adapter=self.first.setdefault(row.adapter.name.split("-")[0], row.adapter))
            return super()._adapter(row, joining)

    return Spoiled


@pytest.mark.long
@pytest.mark.parametrize("how", ["an adapter is ignored", "a version is stale"])
def test_parity_stops_a_run_that_other_weights_play(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kapelle.engines.rollout.vllm import sampler

    monkeypatch.setattr(settings, "find_spec", lambda _: True)
    monkeypatch.setattr(sampler, "start_in_process", lambda kv, rows, options, about: spoiled(how)(about))
    config = resolve({**sections(), "engine": {"name": "vllm"}, "model": {"embedded": {**SIZE, "seed": 0}}})
    with Trainer(config) as trainer, pytest.raises(ParityError):
        trainer.train(3)
