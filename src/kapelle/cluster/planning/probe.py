"""How long a step will take: a few blocks of the model with random weights, timed on the device at hand.

Models of one and of two blocks sample some rows and take one optimiser step. What the second block adds is what every further
one adds. A step of training then takes as much longer as it has more prompt tokens, sampled tokens and tokens in its
passes. Worlds, grading and signals are not timed, and attention over long texts costs more than in proportion.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kapelle.algorithm import Loss, Outputs, Targets
from kapelle.cluster.planning.planned_run import PlannedRun
from kapelle.cluster.planning.update_memory import step_tokens
from kapelle.engines.train.protocol import Objective, TrainEngineSettings, TrainSetup, UpdateLimits
from kapelle.rows import Sample
from kapelle.setup.preparation import PreparedRun
from kapelle.types import Sampling

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel

ROWS, STEPS, TEXT, TOKENS = 256, 6, 256, 2048
"""Most rows, steps of decoding, tokens of a text, and tokens of a pass in the probe."""
WORK = 2 * 10**10
"""Most weights of a block times tokens of a pass: larger models are timed with fewer tokens."""
DEPTHS = (1, 2)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, extrapolated from a probe."""

    device: str
    sampling: float
    """Of one step of training."""
    update: float
    """Of one step of training."""
    run: float
    """Of all steps."""

    @property
    def step(self) -> float:
        """Of one step of training."""
        return self.sampling + self.update


class _Timed(NamedTuple):
    """Seconds of a token of each kind."""

    read: float
    sampled: float
    updated: float


def probe(prepared: PreparedRun, run: PlannedRun) -> Times:
    """Return the times of a run, from probes of each base that the team samples; loads torch, not the weights."""
    sampling = update = 0.0
    device = "cpu"
    for base in run.shapes:
        own = [turn for turn in run.work.turns if run.team.policies[turn.policy].base == base]
        if not own:
            continue
        one, two = (_timed(prepared, run, base, depth) for depth in DEPTHS)
        blocks = run.shapes[base].depth - 1
        each = _Timed(*(max(b, a + blocks * (b - a)) for a, b in zip(one[0], two[0], strict=True)))
        device, episodes = one[1], run.work.tasks * run.work.group
        # Episodes of a task share their first prompt.
        prompts = sum(turn.prompt * (episodes if turn.moment else run.work.tasks) for turn in own)
        sampling += each.read * prompts + each.sampled * episodes * sum(turn.answer for turn in own)
        update += each.updated * step_tokens(run, base) * prepared.algorithm.update.epochs
    return Times(device, sampling, update, (sampling + update) * run.steps)


def _timed(prepared: PreparedRun, run: PlannedRun, base: str, depth: int) -> tuple[_Timed, str]:
    """Return seconds per token of a model with so many blocks, and its device."""
    model = _model(prepared, base, depth)
    longest = min(TEXT, model.renderer.context, max(16, run.work.longest))
    answer = max(4, min(longest // 2, max(turn.answer for turn in run.work.turns)))
    shape, episodes = run.shapes[base], run.work.tasks * run.work.group
    texts = max(2, min(TOKENS, WORK * shape.depth // shape.block) // longest)
    trained = [name for name in prepared.team.trained if prepared.team.policies[name].base == base]
    targets = tuple(range(longest - answer, longest))
    samples = [
        Sample(name, tuple(6 + (k * 31 + n * 7) % 200 for n in range(longest)), targets)
        for name in trained
        for k in range(-(-min(texts, episodes) // len(trained)))
    ]
    setup = TrainSetup(
        {base: model},
        [policy for policy in prepared.team.policies.values() if policy.base == base and not policy.endpoint],
        [],
        prepared.config.optimizer.model_copy(update={"name": "adamw"}),
        UpdateLimits(run.pass_tokens(base), gradient_checkpointing=run.checkpointing),
        0,
    )
    engine = cast("TrainEngineSettings", prepared.config.train_engine).build(setup)
    objective = Objective(_loss, parity=False)
    updates = _seconds(lambda: engine.update(samples, objective), model) if samples else 0.0
    first = setup.policies[0]
    adapter = first.name if first.lora else None
    rows = min(ROWS, episodes, run.max_rows, 4 * texts)
    read, sampled = _decoding(model, adapter, longest - answer, rows)
    engine.close()
    tokens = sum(len(sample.tokens) for sample in samples)
    return _Timed(read, sampled, updates / max(1, tokens)), str(model.device)


def _model(prepared: PreparedRun, base: str, depth: int) -> LanguageModel:
    from kapelle.models.embedded import build_model, build_tokenizer
    from kapelle.models.language_model import DTYPES, LanguageModel, hold_in

    path, settings = prepared.team.bases[base], prepared.config.model
    place = prepared.team.places.get(base)
    dtype, device = (place.dtype, place.device) if place else (settings.dtype, settings.device)
    own = build_tokenizer(settings.embedded.context, sees=path == "embedded" and settings.embedded.sees)
    if path == "embedded":
        shape = settings.embedded.model_copy(update={"layers": depth})
        made = build_model(shape, len(own), int(own.eos_token_id or 0), int(own.pad_token_id or 0))
    else:
        from transformers import AutoConfig

        from kapelle.models.paths import local_only, located
        from kapelle.models.vision import auto_class

        path = located(path)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=local_only(path))
        config.num_hidden_layers = depth
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:depth]
        made = auto_class(config).from_config(config, trust_remote_code=False)
    if base not in prepared.team.trained_bases:
        hold_in(made, DTYPES[dtype])
    return LanguageModel(made, own, dtype, path, kernels=settings.kernels == "auto").to(device)


def _loss(outputs: Outputs, targets: Targets) -> Loss:
    """Minus the log-probs: any loss takes as long."""
    return Loss(-(outputs.logp_K * targets.mask_K).sum(), targets.mask_K.sum(), {})


def _decoding(model: LanguageModel, adapter: str | None, prompt: int, rows: int) -> tuple[float, float]:
    """Return the seconds of a prompt token that is read, and of one that is sampled."""
    from kapelle.engines.rollout.local.decode_batch import Decoder
    from kapelle.engines.rollout.local.decode_strategies import Job

    decoder = Decoder(model, 1)
    sampling = Sampling(max_tokens=100 * STEPS)
    jobs = [
        Job(adapter, tuple(6 + (k * 17 + n) % 200 for n in range(max(1, prompt))), sampling, k)
        for k in range(rows)
    ]

    def read() -> None:
        decoder.drop()
        decoder.join(jobs)

    reading = _seconds(read, model)
    decoding = _seconds(lambda: decoder.advance(STEPS), model)
    decoder.drop()
    return reading / (rows * max(1, prompt)), decoding / (rows * STEPS)


def _seconds(work: Any, model: LanguageModel) -> float:
    """Return the seconds of the second of two calls."""
    import torch

    work()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    began = time.perf_counter()
    work()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began
