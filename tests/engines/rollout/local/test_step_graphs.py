"""A recorded step is the step: nothing that changes from token to token is read from Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.support.tape import PlainRecorder, Tape, TapeRecorder, UnrecordableError
from tests.support.tiny import LORA, stir, tiny_model
from torch import Tensor

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import FlatRows, Job, RowOutput
from kapelle.engines.rollout.local.step_graphs import MOST, GraphRecorder, Recordings
from kapelle.models.fast.fused import fused_of
from kapelle.models.fast.kv_cache import BLOCK, TAIL, Prefixes
from kapelle.models.language_model import LanguageModel
from kapelle.types import Sampling


def model_of(dtype: str = "float32") -> LanguageModel:
    """A tiny base with two adapters."""
    model = tiny_model(dtype=dtype)
    for seed, name in enumerate(("a", "b")):
        model.bank.add(name, LORA, seed)
        stir(model.bank.parameters(name), seed)
    return model


def rows_on(model: LanguageModel, recorder: GraphRecorder | None, fused: bool = True) -> FlatRows:
    assert model.flat is not None
    small = fused_of(model.flat, 3, model.dtype) if fused else None
    return FlatRows(model, model.flat, small, Prefixes(0), recorder)


def jobs_of(prompts: Sequence[int], tokens: int = 100) -> list[Job]:
    """Rows of three adapters (one of them none) on random prompts of these lengths, in the order they join."""
    generator = torch.Generator().manual_seed(sum(prompts))
    drawn = [tuple(torch.randint(6, 262, (length,), generator=generator).tolist()) for length in prompts]
    third = max(1, len(prompts) // 3)
    names = [(None, "a", "b")[min(k // third, 2)] for k in range(len(prompts))]
    return [
        Job(name, prompt, Sampling(max_tokens=tokens), k)
        for k, (name, prompt) in enumerate(zip(names, drawn, strict=True))
    ]


STEPS = BLOCK + TAIL + 3

ALONE = jobs_of([5, 7, 7, 4, 9, 9])
SHARED = [Job(job.adapter, job.prompt, job.sampling, 10 * k) for job in jobs_of([5, 7, 4]) for k in range(4)]


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize("jobs", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "flat"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_replayed_steps_give_the_same_logits_exactly(dtype: str, fused: bool, jobs: list[Job]) -> None:
    model, recorder = model_of(dtype), TapeRecorder()
    recorded, run, plain = (rows_on(model, each, fused) for each in (recorder, PlainRecorder(), None))
    assert torch.equal(recorded.join(jobs), run.join(jobs))
    plain.join(jobs)
    generator = torch.Generator().manual_seed(3)
    before = None
    for _ in range(STEPS):  # tails become blocks on the way
        token_R = torch.randint(6, 262, (len(jobs),), generator=generator)
        found = recorded.read(token_R)
        assert torch.equal(found, run.read(token_R))
        # Rounded sizes change no more than the order of sums.
        apart = (found - plain.read(token_R)).abs()
        assert apart.max() < 1e-4 if dtype == "float32" else apart.mean() < 0.02
        assert before is None or not torch.equal(found, before)
        before = found.clone()
    assert recorder.warmed == recorder.recorded <= 3  # one for each number of blocks in a row
    assert recorder.replayed == STEPS - recorder.warmed


@pytest.mark.slow
@torch.inference_mode()
def test_rows_that_join_and_leave_are_replayed_as_they_are_run() -> None:
    model, recorder = model_of(), TapeRecorder()
    recorded, run = rows_on(model, recorder), rows_on(model, PlainRecorder())
    generator = torch.Generator().manual_seed(4)
    size = 0

    def read(steps: int) -> None:
        for _ in range(steps):
            token_R = torch.randint(6, 262, (size,), generator=generator)
            assert torch.equal(recorded.read(token_R), run.read(token_R))

    for jobs, steps in ((ALONE, 9), (SHARED, 20), (jobs_of([3, 3, 12]), 30)):
        for rows in (recorded, run):
            rows.join(jobs)
        size += len(jobs)
        read(steps)
    for rows in (recorded, run):
        rows.leave([0, 3, 8, 20], [[1, 2, 3]] * 4)
    size -= 4
    read(20)
    assert recorder.replayed > 9 * recorder.warmed


def to_the_end(decoder: Decoder) -> None:
    while decoder.in_flight:
        decoder.advance(100)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "flat"])
def test_whole_conversations_are_the_same(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.setattr("kapelle.models.fast.fused.LARGEST", 0)
    model, recorder = model_of(), TapeRecorder()

    def said(recorder_on: Callable[[torch.device], GraphRecorder | None]) -> list[RowOutput]:
        decoder = Decoder(model, 3, 4096, recorder_on)
        first = decoder.join(jobs_of([5, 7, 7, 4, 9, 9], tokens=40))
        decoder.advance(11)
        second = decoder.join(jobs_of([6, 6, 6], tokens=25))
        to_the_end(decoder)
        longer = [
            Job(job.adapter, (*job.prompt, *spoken.ids, 9), Sampling(max_tokens=20), 50 + k)
            for k, (job, spoken) in enumerate(zip(jobs_of([5, 7, 7, 4, 9, 9], tokens=40), first, strict=True))
        ]
        third = decoder.join(longer)
        to_the_end(decoder)
        return [*first, *second, *third]

    new_messages = said(lambda _device: recorder)
    assert new_messages == said(lambda _device: PlainRecorder())
    for ours, plain in zip(new_messages, said(lambda _device: None), strict=True):
        assert ours.ids == plain.ids
        assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    assert recorder.replayed > 0


def test_a_rested_decoder_lets_its_recordings_go() -> None:
    recorder = TapeRecorder()
    decoder = Decoder(model_of(), recorder_on=lambda _device: recorder)
    decoder.join(ALONE)
    decoder.advance(5)
    assert recorder.forgotten == 0
    decoder.release_caches()
    assert (recorder.forgotten, decoder.in_flight) == (1, 0)


class TestRecordings:
    @pytest.fixture(autouse=True)
    def _held(self) -> None:
        self.held: dict[object, Tensor] = {}

    def run(self, recordings: Recordings, key: object, steps: int) -> None:
        token_S = torch.zeros(1)
        for number in range(steps):
            token_S.fill_(number)
            held_S = self.held.setdefault(key, torch.zeros(1)).copy_(token_S)
            assert torch.equal(recordings.run(key, functools.partial(torch.mul, held_S, 2)), 2 * token_S)

    def test_the_first_step_of_a_kind_is_run_the_second_recorded_the_others_replayed(self) -> None:
        recorder = TapeRecorder()
        recordings = Recordings(recorder)
        self.run(recordings, "one", 16)
        assert (recorder.warmed, recorder.recorded, recorder.replayed) == (1, 1, 15)
        self.run(recordings, "other", 3)
        assert (recorder.warmed, recorder.recorded, recorder.replayed) == (2, 2, 17)

    def test_the_oldest_recording_is_removed_first(self) -> None:
        recorder = TapeRecorder()
        recordings = Recordings(recorder)
        for key in range(MOST):
            self.run(recordings, key, 2)
        self.run(recordings, 0, 1)
        self.run(recordings, MOST, 2)
        self.run(recordings, 0, 1)
        assert recorder.recorded == MOST + 1
        self.run(recordings, 1, 1)
        assert recorder.recorded == MOST + 2


class TestTape:
    """The tape would notice."""

    def test_a_number_that_python_counts_is_baked_in(self) -> None:
        count = [0]
        total = torch.zeros(2)

        def step() -> Tensor:
            count[0] += 1
            return total.add_(count[0]).clone()

        replay = TapeRecorder().record(step)
        assert [replay()[0].item() for _ in range(3)] == [1, 2, 3]  # where counting on would give 1, 3, 6

    @pytest.mark.parametrize(
        "step",
        [
            lambda: torch.zeros(2) + float(torch.ones(1).sum()),
            lambda: torch.ones(2)[torch.ones(2) > 0],
            lambda: torch.tensor([1.0, 2.0]),
            lambda: torch.zeros(2) if bool((torch.ones(2) > 0).all()) else torch.ones(2),
        ],
    )
    def test_a_synchronisation_of_the_gpu_ends_a_recording(self, step: Callable[[], Tensor]) -> None:
        with pytest.raises(UnrecordableError), Tape():
            step()
