"""The local rollout engine, which decodes the requests of all agents in one batch, in the trainer's process.

Coroutines submit requests and wait. When no coroutine can continue without a completion, all submitted requests join
the batch as rows, each with its own adapter. Finished rows leave the batch, and their completions are returned while
the other rows continue, so that the next turns of their agents can join. The engine waits for episodes whose
environments are busy (`runtime/batch_barrier.py`). Requests that join together are sorted in a fixed order instead of
by arrival. Runs are repeatable because the engine waits and because this order is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput, decode_strategy
from kapelle.engines.rollout.local.sampling import likeliest
from kapelle.engines.rollout.local.step_graphs import GraphRecorder, on_cuda
from kapelle.engines.rollout.protocol import (
    AppliesConstraints,
    Completion,
    HasNotes,
    HasQueue,
    KnowsAlternatives,
    Likeliest,
    OnTokens,
    Request,
    ServesCallers,
)
from kapelle.engines.rollout.request_queue import PAUSE, BatchingEngine, PendingRequest, RequestQueue
from kapelle.errors import ContextError, EngineError, ModelError, did_you_mean
from kapelle.models.devices import multiplies
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import copy_weights
from kapelle.models.renderer import ChatRenderer
from kapelle.models.token_masks import NEAR
from kapelle.models.weights import weights_hash
from kapelle.team import Policy
from kapelle.types import Constraint, images_in

_Pending = PendingRequest[RowOutput]

SERVED_STEPS = 4
"""The maximum number of tokens that rows generate, while the engine serves external callers, before new requests may
join and streams receive their tokens."""


@dataclass(slots=True, eq=False)
class _ModelQueue(RequestQueue[RowOutput]):
    """A base model with its waiting requests and the requests that are being decoded."""

    model: LanguageModel
    decoder: Decoder
    in_flight: list[_Pending] = field(default_factory=list, kw_only=True)

    def clear(self) -> list[_Pending]:
        """Drop all rows of the batch and return their requests."""
        self.decoder.drop()
        dropped, self.in_flight = self.in_flight, []
        return dropped


@dataclass(slots=True)
class _LoadedPolicy:
    queue: _ModelQueue
    adapter: str | None
    version: int = 0
    hash: str = ""


def has_memory_of_its_own(device: torch.device) -> bool:
    """Return whether a device has separate memory, which is small and which sampling frees before an update.

    The result is True for CUDA, where KV caches and copies of weights compete with activations for memory. The result
    is False for a CPU, whose memory is large, because recomputing KV caches and copies of weights takes time.
    """
    return device.type == "cuda"


def check_recording(model: LanguageModel) -> None:
    """Raise ModelError if the model records routing but has to be decoded without a KV cache."""
    if model.choices is not None and decode_strategy(model).name != "cache":
        raise ModelError(
            f"`model.routing: replayed` needs a model that decodes with a KV cache, but '{model.name}' reads its whole "
            "text again for each token. Set `model.routing: free`."
        )


def _check_ids(request: Request, model: LanguageModel) -> None:
    """Raise ContextError if a prompt has no tokens or contains ids outside the model's vocabulary."""
    ids = request.prompt_ids + request.begun
    if not ids or min(ids) < 0 or max(ids) >= model.vocabulary:
        what = f"contains the id {max(ids) if min(ids) >= 0 else min(ids)}" if ids else "has no token"
        raise ContextError(
            f"A prompt of '{request.agent}' {what}, but '{model.name}' needs at least one token, with ids from 0 to "
            f"{model.vocabulary - 1}."
        )


def _join(queue: _ModelQueue, joining: Sequence[_Pending], jobs: Sequence[Job]) -> None:
    """Add requests to the batch. A request that cannot join fails without affecting the other requests."""
    queue.in_flight += joining
    try:
        outputs = queue.decoder.join(jobs) if jobs else ()
    except Exception as error:  # noqa: BLE001 - passed on to the request that waits
        queue.in_flight = [pending for pending in queue.in_flight if pending not in joining]
        if len(jobs) == 1:
            joining[0].fail(error)
            return
        # One of them is the cause: start each separately, as many as may join now.
        for place, pending in enumerate(joining):
            if not queue.decoder.open:
                queue.waiting = [*joining[place:], *queue.waiting]
                return
            _join(queue, [pending], jobs[place : place + 1])
        return
    for pending, output in zip(joining, outputs, strict=True):
        pending.output = output
        pending.start_clock()


class LocalEngine(
    BatchingEngine[_ModelQueue], ServesCallers, KnowsAlternatives, AppliesConstraints, HasNotes, HasQueue
):
    """A rollout engine that samples from the trainer's base models without copying their weights."""

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        policies: Sequence[Policy],
        max_rows: int = 1024,
        kept_tokens: int = 65_536,
        releases: Callable[[torch.device], bool] = has_memory_of_its_own,
        recorder_on: Callable[[torch.device], GraphRecorder | None] = on_cuda,
        patience: float = 60.0,
        kv_bytes: int | None = None,
    ) -> None:
        """Create an engine that samples from these models.

        Each base model decodes at most `max_rows` rows at a time, and its KV cache uses at most `kv_bytes` bytes (see
        `Decoder`).

        The function `releases` returns whether `release_caches` also frees copies of weights on a device. The function
        `recorder_on` returns the recorder of decoding steps for a device. The argument `patience` is the maximum time
        in seconds to wait for busy episodes.
        """
        super().__init__(patience)
        local = [policy for policy in policies if policy.endpoint is None]
        for model in models.values():
            check_recording(model)
        queues = {
            id(model): _ModelQueue(
                model,
                Decoder(
                    model, sum(models[p.base] is model for p in local), kept_tokens, recorder_on, kv_bytes
                ),
            )
            for model in models.values()
        }
        self.queues = list(queues.values())
        self._loaded = {
            p.name: _LoadedPolicy(queues[id(models[p.base])], p.name if p.lora else None) for p in local
        }
        for name, loaded in self._loaded.items():
            loaded.hash = weights_hash(self._weights(name))
        self.max_rows = max_rows
        self._releases = releases
        self._steps, self._at_once = PAUSE, False
        self.tokens_sampled = 0
        """The number of completion tokens that the engine has sampled."""

    @property
    def policies(self) -> Sequence[str]:
        """The names of the policies that the engine can sample from."""
        return tuple(self._loaded)

    def add(self, policy: Policy, model: LanguageModel) -> None:
        """Add a policy whose adapter was added to one of the engine's models. Requests in flight continue."""
        queue = next(queue for queue in self.queues if queue.model is model)
        self._loaded[policy.name] = _LoadedPolicy(queue, policy.name if policy.lora else None)

    def remove(self, policy: str) -> bool:
        """Remove a policy, and return whether it was removed. A policy stays while a row of the batch or a request needs it."""
        loaded = self._policy(policy)
        queue = loaded.queue
        wanted = any(each.request.policy == policy for each in (*queue.arrived, *queue.waiting))
        if wanted or queue.decoder.reads(loaded.adapter):
            return False
        queue.decoder.forget(loaded.adapter)
        del self._loaded[policy]
        return True

    @property
    def notes(self) -> Sequence[str]:
        """Notes on chat templates, and on models that are slow because of their attention, their cache or their data type."""
        templates = (note for queue in self.queues for note in queue.model.renderer.notes)
        slow = (
            f"'{queue.model.name}' ({type(queue.model.model).__name__}) reads its whole text again for every sampled "
            "token, so long texts are slow: its cache does not reproduce the logits of whole texts when rows of "
            "different lengths share a batch. docs/models.md lists families with a usable cache."
            for queue in self.queues
            if queue.decoder.strategy == "reread"
        )
        plain = (
            f"'{queue.model.name}' ({type(queue.model.model).__name__}) has no fused attention in transformers, so attention "
            "needs memory that grows with the square of a text's length: keep prompts and `max_tokens` short."
            for queue in self.queues
            if queue.model.plain_attention
        )
        emulated = (
            f"this processor has no instructions for {str(queue.model.dtype).removeprefix('torch.')}, so '{queue.model.name}' runs several times "
            "slower than in float32. Set `model.dtype: float32` if the memory suffices (`kapelle plan`)."
            for queue in self.queues
            if queue.model.device.type == "cpu" and not multiplies(queue.model.dtype)
        )
        return (*dict.fromkeys(templates), *plain, *slow, *emulated)

    def renderer(self, policy: str) -> ChatRenderer:
        """Return the renderer that converts the conversations of a policy into tokens."""
        return self._policy(policy).queue.model.renderer

    async def generate(self, request: Request) -> Completion:
        """Return one completion, decoded in one batch with the other requests."""
        return await self.stream(request, None)

    async def stream(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        """Return one completion, like `generate`, and pass its tokens to `on_tokens` as they are sampled, except for the last tokens."""
        queue = self._policy(request.policy).queue
        # Here, only the invalid request fails; in the batch it would fail all rows, and an unknown id would corrupt the
        # GPU's context.
        _check_ids(request, queue.model)
        if request.sampling.constraint is not None:
            queue.model.masks.begin(request.sampling.constraint)
        self._start_pump()
        return await queue.answer_to(request, on_tokens)

    def _all_queues(self) -> Sequence[_ModelQueue]:
        return self.queues

    def _forget_interrupted(self) -> None:
        for left in self.queues:
            left.clear()
            left.drop_cancelled()

    def run_freely(self) -> None:
        """Sample from now on without waiting for busy episodes (see `Interruptible.run_freely`)."""
        self._patience, self._at_once = 0.0, True

    @property
    def waiting(self) -> int:
        """The number of requests that are waiting to join a batch."""
        return sum(len(queue.arrived) + len(queue.waiting) for queue in self.queues)

    def serve(self) -> None:
        """Return each completion as soon as its row is finished from now on, without waiting for episodes.

        This method is for callers that can send requests at any time. The last bits of their results depend on when the
        requests arrive.
        """
        self._patience, self._steps, self._at_once = 0.0, SERVED_STEPS, True

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Load new weights for a policy. Tensors that already share memory with the engine are not copied."""
        loaded = self._policy(policy)
        if not self._runs:
            loaded.queue.clear()
        elif loaded.queue.in_flight:
            raise EngineError(
                f"Policy '{policy}' got new weights while {len(loaded.queue.in_flight)} requests to its base model are "
                "unfinished. Load weights after all requests have completed."
            )
        own = self._weights(policy)
        try:
            copy_weights(own, cast("Mapping[str, Tensor]", weights), f"policy '{policy}'")
        except ModelError as error:
            raise EngineError(str(error)) from None
        loaded.queue.decoder.forget(loaded.adapter)
        loaded.version = version
        loaded.hash = weights_hash(own)

    def release_caches(self) -> None:
        """Free the kept KV cache, and also copies of weights on devices where the update needs the memory.

        The training loop calls this method when all episodes have ended, so nothing is freed between the turns of a
        rollout. The kept KV cache of a trained adapter is dropped anyway when the next weights of the adapter arrive.
        The cache of frozen policies would grow with every step, would be of little use to later episodes, and would be
        missing in a resumed run.
        """
        if self._runs:
            return
        released = [queue for queue in self.queues if self._releases(queue.model.device)]
        for queue in self.queues:
            queue.clear()
            if queue in released:
                queue.decoder.release_caches()
            else:
                queue.decoder.forget_read()
        if any(queue.model.device.type == "cuda" for queue in released):
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Release the models. Their memory is freed when nothing else refers to the models."""
        self._loaded.clear()

    def _fail(self, queue: _ModelQueue, error: Exception, *, waiting: bool) -> None:
        failed = queue.clear()
        if waiting:
            failed, queue.waiting = [*failed, *queue.waiting], []
        for pending in failed:
            pending.fail(error)

    def _hold(self, queue: _ModelQueue) -> None:
        queue.decoder.settle()
        self._answer_finished(queue)
        queue.decoder.interrupt()
        dropped = queue.clear()
        for pending in dropped:
            output, pending.output = pending.output, None
            if output is not None:
                loaded = self._policy(pending.request.policy)
                pending.sampled(output.ids, output.logprobs, loaded.version, loaded.hash)
                self.tokens_sampled += len(output.ids)
        queue.waiting = [*dropped, *queue.waiting]

    def _advance(self, queue: _ModelQueue) -> None:
        gone = [pending.output for pending in queue.in_flight if pending.future.done()]
        queue.decoder.end([output for output in gone if output is not None])

        room = self.max_rows - queue.decoder.in_flight
        if queue.waiting and room > 0 and queue.decoder.open:
            jobs = [
                Job(
                    self._policy(pending.request.policy).adapter,
                    pending.text_ids,
                    pending.request.sampling,
                    pending.request.seed,
                    len(pending.request.begun) + len(pending.ids),
                    images_in(pending.request.messages),
                )
                for pending in queue.waiting[:room]
            ]
            jobs = jobs[: queue.decoder.room(jobs)]
            joining, queue.waiting = queue.waiting[: len(jobs)], queue.waiting[len(jobs) :]
            _join(queue, joining, jobs)

        if queue.in_flight:
            queue.decoder.advance(self._steps)
        if self._at_once:
            queue.decoder.settle()
        streaming = {
            id(pending.output): pending.on_tokens
            for pending in queue.in_flight
            if pending.on_tokens is not None
        }
        if streaming:
            for output, ids, logprobs in queue.decoder.new_tokens():
                if (on_tokens := streaming.get(id(output))) is not None:
                    on_tokens(ids, logprobs)
        self._answer_finished(queue)

    def _answer_finished(self, queue: _ModelQueue) -> None:
        """Return the completions of finished rows to the waiting coroutines."""
        answers: list[tuple[_Pending, Completion]] = []
        unfinished: list[_Pending] = []
        for pending in queue.in_flight:
            output = pending.output
            if output is None or output.finish_reason is None:
                unfinished.append(pending)
                continue
            request, loaded, text = pending.request, self._policy(pending.request.policy), output.text
            if text is None:
                ids = [*request.begun, *pending.ids, *output.ids]
                text = str(queue.model.tokenizer.decode(ids, skip_special_tokens=True))
            self.tokens_sampled += len(output.ids)
            completion = pending.completion(
                *(output.ids, output.logprobs, output.finish_reason, text),
                *(loaded.version, loaded.hash, output.routing),
            )
            answers.append((pending, completion))
        queue.in_flight = unfinished
        for pending, completion in answers:
            pending.answer(completion)

    def alternatives(self, request: Request, ids: Sequence[int], count: int) -> Sequence[Likeliest]:
        """Return the most likely tokens at the position of each token id (see `KnowsAlternatives.alternatives`)."""
        loaded = self._policy(request.policy)
        return likeliest(loaded.queue.model, loaded.adapter, request.prompt_ids, ids, request.sampling, count)

    def fits(self, policy: str, constraint: Constraint, most: int) -> bool | None:
        """Return whether a completion of at most `most` tokens can satisfy a constraint (see `AppliesConstraints.fits`)."""
        # The search for a longer completion is never conclusive.
        return (
            self._policy(policy).queue.model.masks.fits(constraint, most, briefly=True)
            if most <= NEAR
            else None
        )

    def _weights(self, policy: str) -> Mapping[str, Tensor]:
        loaded = self._policy(policy)
        model = loaded.queue.model
        return model.bank.parameters(policy) if loaded.adapter else model.base_parameters()

    def _policy(self, policy: str) -> _LoadedPolicy:
        if policy not in self._loaded:
            raise EngineError(
                f"The local engine has no policy '{policy}'.{did_you_mean(policy, self._loaded)}"
            )
        return self._loaded[policy]
