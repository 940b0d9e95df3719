"""The rollout engine `vllm`, which forms batches, publishes adapters and weights, and starts vLLM or its server.

Requests are batched as in the local engine: when no coroutine can continue without a completion, all requests join the
batch in a fixed order. The engine avoids silent errors of vLLM. Rows with and without an adapter are in separate
batches, unless this vLLM can mix them (see `settings.MIXES_RIGHTLY`). New weights are never published under an old name
(see `WeightFiles`). New weights of whole models are loaded by kapelle's own method (`worker.TakesWeights`) or, if this
method is not available, by restarting vLLM.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import cast

from torch import Tensor

from kapelle.engines.rollout.protocol import (
    AppliesConstraints,
    Completion,
    HasNotes,
    HeldRequest,
    Request,
)
from kapelle.engines.rollout.request_queue import PAUSE, BatchingEngine, PendingRequest, RequestQueue
from kapelle.engines.rollout.vllm.sampler import AdapterFile, BaseModel, FinishedRow, Row, Start, VllmModel
from kapelle.engines.rollout.vllm.worker import WEIGHTS_FILE
from kapelle.errors import EngineError, ModelError, did_you_mean
from kapelle.models.adapters import named
from kapelle.models.language_model import DTYPES, LanguageModel
from kapelle.models.lora_bank import layers_of
from kapelle.models.renderer import ChatRenderer
from kapelle.models.weights import save_adapter, weights_hash
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Policy
from kapelle.types import FinishReason

_Waiting = PendingRequest[Row]


@dataclass(slots=True, eq=False)
class _Queue(RequestQueue[Row]):
    """A base model with its sampler and the requests to it."""

    model: LanguageModel
    about: BaseModel
    sampler: VllmModel | None = None
    """The sampler, or None before the first request and after an error."""
    newer: bool = False
    """Whether the weights in memory are newer than the weights in `about.path`."""
    in_flight: dict[str, _Waiting] = field(default_factory=dict, kw_only=True)
    """The requests that are being decoded, by row id."""

    def close(self) -> None:
        """Release the sampler. The next request starts a new sampler."""
        sampler, self.sampler = self.sampler, None
        if sampler is not None:
            sampler.close()


class VllmEngine(BatchingEngine[_Queue], AppliesConstraints, HasNotes):
    """A rollout engine that samples with vLLM from copies of the trainer's base models."""

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        policies: Sequence[Policy],
        start: Start,
        folder: Path,
        *,
        mixes: bool = False,
        restarts: bool = True,
        in_place: bool = True,
        max_rows: int = 256,
        patience: float = 60.0,
    ) -> None:
        """Create an engine that samples from copies of these models, started by `start`. Published weights are written to `folder`.

        The flag `mixes` states whether rows with and without an adapter may share a batch. The flag `restarts` states
        whether `start` can start vLLM on other base weights. The flag `in_place` states whether a running vLLM may load
        new base weights.
        """
        super().__init__(patience)
        self._in_place = in_place
        self._start, self._mixes, self.max_rows = start, mixes, max_rows
        self._restarts = restarts
        self._files = WeightFiles(folder)
        self._rows = count()
        self._follows = False
        """Whether requests can be put on hold."""
        local = [policy for policy in policies if policy.endpoint is None]
        self._policies = {policy.name: self._files.begin(policy, models[policy.base]) for policy in local}
        self.queues: dict[int, _Queue] = {}
        # Clean up even without `close`; otherwise a server and gigabytes of files would remain.
        self._end = weakref.finalize(self, _release, self.queues, self._files)
        bases = {id(loaded.model): loaded.model for loaded in self._policies.values()}
        gpus = tuple(m.device.index or 0 for m in bases.values() if m.device.type == "cuda")
        for place, model in enumerate(bases.values()):
            own = [loaded.policy for loaded in self._policies.values() if loaded.model is model]
            # vLLM reads a base from its original folder, or from a copy of the weights in memory.
            path = Path(model.name).expanduser()
            if not path.is_dir():
                path = self._files.model(model, model.base_parameters())
            about = base_model(model, str(path), own)
            about = replace(about, share=1 / (len(bases) - place), trained_on=gpus)
            self.queues[id(model)] = _Queue(model, about)
        try:
            # Start vLLM now, so that a failure stops the run at its beginning.
            for queue in self.queues.values():
                queue.sampler = start(queue.about)
        except BaseException:
            self.close()
            raise

    @property
    def policies(self) -> Sequence[str]:
        """The names of the policies that the engine can sample from."""
        return tuple(self._policies)

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the chat templates of the models."""
        return tuple(
            dict.fromkeys(n for loaded in self._policies.values() for n in loaded.model.renderer.notes)
        )

    def renderer(self, policy: str) -> ChatRenderer:
        """Return the renderer that converts the conversations of a policy into tokens."""
        return self._policy(policy).model.renderer

    async def generate(self, request: Request) -> Completion:
        """Return one completion, sampled in one batch with the other requests."""
        queue = self._queue(request.policy)
        if request.sampling.constraint is not None:
            queue.model.masks.begin(
                request.sampling.constraint
            )  # raises an error for an unsupported constraint before vLLM gets it
        self._start_pump()
        return await queue.answer_to(request)

    def _all_queues(self) -> Sequence[_Queue]:
        return list(self.queues.values())

    def run_freely(self) -> None:
        """Sample from now on without waiting for busy episodes (see `Interruptible.run_freely`)."""
        self._patience, self._follows = 0.0, True

    async def hold(self) -> Sequence[HeldRequest]:
        """Put all unfinished requests on hold, and return them (see `Interruptible.hold`)."""
        assert self._follows, "`run_freely` is called first"
        return await super().hold()

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Load new weights: an adapter under a new name, or a whole model into vLLM's memory or by restarting vLLM."""
        loaded, queue = self._policy(policy), self._queue(policy)
        given = cast("Mapping[str, Tensor]", weights)
        if loaded.shapes.keys() != given.keys():
            odd = min(loaded.shapes.keys() ^ given.keys())
            raise EngineError(
                f"The weights of policy '{policy}' do not fit the running model: '{odd}' exists only in one of the two."
            )
        for name, shape in loaded.shapes.items():
            if tuple(given[name].shape) != shape:
                raise EngineError(
                    f"The weights of policy '{policy}' do not fit: '{name}' has shape {tuple(given[name].shape)}, but "
                    f"{shape} in the running model."
                )
        if not self._runs:
            self._forget_interrupted()
        elif queue.in_flight:
            raise EngineError(
                f"Policy '{policy}' got new weights while {len(queue.in_flight)} requests to its base model are "
                "unfinished. Load weights after all requests have completed."
            )
        if loaded.adapter is None and not self._restarts:
            raise EngineError(
                f"Policy '{policy}' trains a whole model, but an external server can load only adapters. Set "
                "`engine.server: start`, or remove `engine.server`."
            )
        if loaded.adapter is None:
            self._replace_base(queue, given)
        else:
            old, loaded.adapter = loaded.adapter, self._files.adapter(loaded, given, version)
            if queue.sampler is not None:
                queue.sampler.drop_adapter(old)
                queue.sampler.forget_prefixes()
            self._files.drop(old.folder)
        loaded.version = version
        loaded.hash = weights_hash(given)

    def release_caches(self) -> None:
        """Free vLLM's device memory until the next request. On a CPU, only the prefix cache is emptied."""
        if self._runs:
            return
        self._forget_interrupted()
        for queue in self.queues.values():
            if queue.sampler is not None:
                queue.sampler.forget_prefixes()
                queue.sampler.sleep()

    def close(self) -> None:
        """Stop vLLM and delete the published files. A second call does nothing."""
        self._policies.clear()
        self._end()

    def _replace_base(self, queue: _Queue, weights: Mapping[str, Tensor]) -> None:
        """Replace the base weights in a running vLLM, or write the weights to a folder and restart vLLM on this folder."""
        folder: list[Path] = []

        def write() -> Path:
            if not folder:
                folder.append(self._files.model(queue.model, weights))
            return folder[0]

        taken = False
        if self._in_place and queue.sampler is not None:
            try:
                taken = queue.sampler.take(weights, write)
                why = "this vLLM, or this server, does not support it"
            except Exception as error:  # noqa: BLE001 - a restart works after any error
                why = f"it failed ({error})"
            if not taken:
                self._in_place = False
                logging.getLogger(__name__).warning(
                    "vLLM is restarted whenever whole weights are published, which is slow. Weights cannot be loaded in "
                    "place, because %s.",
                    why,
                )
        if not taken:
            self._restart_on(queue, write())
            return
        # A restart after a fault needs the trainer's own tensors, or a file if these are copies.
        own = queue.model.base_parameters()
        queue.newer = all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in weights.items())
        if not queue.newer or folder:
            self._read_from(queue, write())

    def _read_from(self, queue: _Queue, folder: Path) -> None:
        """Make the next sampler of a queue start from another folder."""
        old, queue.about, queue.newer = Path(queue.about.path), replace(queue.about, path=str(folder)), False
        self._files.drop(old)

    def _restart_on(self, queue: _Queue, folder: Path) -> None:
        """Restart vLLM on the base weights in another folder."""
        queue.close()
        self._read_from(queue, folder)
        queue.sampler = self._start(queue.about)

    def _forget_interrupted(self) -> None:
        for queue in self.queues.values():
            if queue.in_flight and queue.sampler is not None:
                queue.sampler.abort(list(queue.in_flight))
            queue.in_flight.clear()
            queue.drop_cancelled()

    def _fail(self, queue: _Queue, error: Exception, *, waiting: bool) -> None:
        # The requests that wait fail in any case, because the sampler is closed: its state is unknown.
        failed = [*queue.in_flight.values(), *queue.waiting]
        queue.in_flight, queue.waiting = {}, []
        for pending in failed:
            pending.fail(error)
        try:
            queue.close()
        except Exception:  # noqa: BLE001 - the sampler is already broken
            queue.sampler = None

    def _hold(self, queue: _Queue) -> None:
        dropped, queue.in_flight = queue.in_flight, {}
        if dropped and queue.sampler is not None:
            for row, sampled in queue.sampler.abort(list(dropped)).items():
                pending = dropped[row]
                if not self._answer(queue, pending, sampled, ended=False):
                    loaded = self._policy(pending.request.policy)
                    pending.sampled(sampled.ids, sampled.logprobs, loaded.version, loaded.hash)
        queue.waiting = [
            *(pending for pending in dropped.values() if not pending.future.done()),
            *queue.waiting,
        ]

    def _advance(self, queue: _Queue) -> None:
        gone = [row for row, pending in queue.in_flight.items() if pending.future.done()]
        if gone and queue.sampler is not None:
            queue.sampler.abort(gone)
        for row in gone:
            del queue.in_flight[row]
        self._join_waiting(queue)
        finished: Sequence[FinishedRow] = ()
        for _ in range(PAUSE):
            if not queue.in_flight or finished:
                break
            assert queue.sampler is not None
            finished = queue.sampler.step()
            for sampled in finished:
                pending = queue.in_flight.pop(sampled.id, None)
                if pending is None:
                    continue
                if sampled.error is not None:
                    pending.fail(EngineError(sampled.error))
                    continue
                self._answer(queue, pending, sampled, ended=True)

    def _answer(self, queue: _Queue, pending: _Waiting, sampled: FinishedRow, *, ended: bool) -> bool:
        """Return the completion of a request to its coroutine if the row has `ended`, or if its text contains a stop string.

        vLLM searches only the tokens that it sampled after a hold, so a stop string that begins in earlier tokens is found here.
        Returns whether the request is complete.
        """
        request, loaded = pending.request, self._policy(pending.request.policy)
        before, count, stopped = (*request.begun, *pending.ids), len(sampled.ids), sampled.stopped

        def decode(ids: Sequence[int]) -> str:
            return str(queue.model.tokenizer.decode(list(ids), skip_special_tokens=True))

        if before and request.sampling.stop:
            found = _first_stop(decode, before, sampled.ids, request.sampling.stop)
            count, stopped = (count, stopped) if found is None else (found, True)
        if not (ended or stopped):
            return False
        text = decode([*before, *sampled.ids[:count]])
        for stop in request.sampling.stop:
            text = text.partition(stop)[0]
        last = sampled.ids[:count], sampled.logprobs[:count]
        finish: FinishReason = "stop" if stopped else "length"
        pending.answer(pending.completion(*last, finish, text, loaded.version, loaded.hash))
        return True

    def _join_waiting(self, queue: _Queue) -> None:
        """Add the first waiting rows to the batch. Rows with and without an adapter take turns if they must not share a batch."""
        if not queue.waiting:
            return
        if queue.sampler is None:
            if queue.newer:
                self._read_from(queue, self._files.model(queue.model, queue.model.base_parameters()))
            queue.sampler = self._start(queue.about)
        joining = queue.waiting
        if not self._mixes:
            inside = next(iter(queue.in_flight.values()), queue.waiting[0])
            bare = self._policy(inside.request.policy).adapter is None
            joining = [
                pending
                for pending in queue.waiting
                if (self._policy(pending.request.policy).adapter is None) == bare
            ]
            if queue.in_flight and len(joining) < len(queue.waiting):
                return  # or the others might wait forever
        joining = joining[: max(0, self.max_rows - len(queue.in_flight))]
        taken = set(map(id, joining))
        queue.waiting = [pending for pending in queue.waiting if id(pending) not in taken]
        for pending in joining:
            loaded = self._policy(pending.request.policy)
            request = pending.request
            done = len(request.begun) + len(pending.ids)
            row = Row(
                str(next(self._rows)),
                pending.text_ids,
                replace(request.sampling, max_tokens=request.sampling.max_tokens - done),
                derive_seed(request.seed, "continued", done) if done else request.seed,
                loaded.adapter,
                followed=self._follows,
            )
            try:
                queue.sampler.add(row)
            except Exception as error:  # noqa: BLE001 - fails this request only
                pending.fail(error)
                continue
            queue.in_flight[row.id] = pending
            pending.start_clock()

    def _queue(self, policy: str) -> _Queue:
        return self.queues[id(self._policy(policy).model)]

    def _policy(self, policy: str) -> VllmPolicy:
        if policy not in self._policies:
            raise EngineError(
                f"The engine `vllm` has no policy '{policy}'.{did_you_mean(policy, self._policies)}"
            )
        return self._policies[policy]


def _first_stop(
    decode: Callable[[Sequence[int]], str], before: Sequence[int], ids: Sequence[int], stops: Sequence[str]
) -> int | None:
    """Return the smallest number of `ids` that complete a stop string after the tokens `before`, or None if there is no stop string."""

    def ends(count: int) -> bool:
        text = decode([*before, *ids[:count]])
        return any(stop in text for stop in stops)

    first = bisect_left(range(len(ids) + 1), True, key=ends)
    return first if first <= len(ids) else None


def _release(queues: Mapping[int, _Queue], files: WeightFiles) -> None:
    """Stop the samplers and delete the published files."""
    try:
        for queue in queues.values():
            queue.close()
    finally:
        files.close()


@dataclass(slots=True)
class VllmPolicy:
    """A policy with its base model and its current weights in vLLM."""

    policy: Policy
    model: LanguageModel
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the policy's weights by name."""
    hash: str
    version: int = 0
    adapter: AdapterFile | None = None


class WeightFiles:
    """A folder of published weights, which contains adapters under unique names and whole models.

    vLLM identifies an adapter by name and number and caches it, so new weights under an old name would be ignored.
    Every publication therefore uses a new name, and the old files are deleted when the new files are in place.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count(1)
        self._own = secrets.token_hex(4)
        """A part of every name that is unique to this process, because several processes may publish adapters to one
        server."""

    def begin(self, policy: Policy, model: LanguageModel) -> VllmPolicy:
        """Return a policy with its weights in the trainer's memory, and write the policy's adapter if there is one."""
        weights = model.bank.parameters(policy.name) if policy.lora else model.base_parameters()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        loaded = VllmPolicy(policy, model, shapes, weights_hash(weights))
        if policy.lora is not None:
            loaded.adapter = self.adapter(loaded, weights, 0)
        return loaded

    def adapter(self, loaded: VllmPolicy, weights: Mapping[str, Tensor], version: int) -> AdapterFile:
        """Write the adapter of a policy under a new name."""
        assert loaded.policy.lora is not None
        number = next(self._numbers)
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', loaded.policy.name)}-{version}-{number}-{self._own}"
        with _writing(f"the adapter of policy '{loaded.policy.name}'", self._folder):
            save_adapter(
                self._folder / name, weights, named(layers_of(loaded.model.model), loaded.policy.lora), "base"
            )
        return AdapterFile(name, number, self._folder / name)

    def model(self, model: LanguageModel, weights: Mapping[str, Tensor]) -> Path:
        """Write a base model with these weights and its tokeniser as a folder that `transformers` can load, and return the folder."""
        from safetensors.torch import save_file

        folder = self._folder / f"model-{next(self._numbers)}"
        with _writing("a base model", self._folder):
            folder.mkdir(parents=True)
            config = deepcopy(model.model.config)
            config.architectures = [type(model.model).__name__]
            config.save_pretrained(folder)
            model.tokenizer.save_pretrained(folder)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
        return folder

    def drop(self, folder: Path) -> None:
        """Delete a published folder. Folders outside the folder of published weights are kept."""
        if folder.is_relative_to(self._folder):
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete all published files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def base_model(model: LanguageModel, path: str, policies: list[Policy]) -> BaseModel:
    """Return vLLM's description of the base model of these policies."""
    loras = [policy.lora for policy in policies if policy.lora is not None]
    learning = [
        model.bank.parameters(policy.name) if policy.lora else model.base_parameters()
        for policy in policies
        if policy.trained
    ]
    config = model.model.config.get_text_config()
    head_size = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return BaseModel(
        path,
        next(name for name, dtype in DTYPES.items() if dtype == model.dtype),
        model.renderer.context,
        tuple(sorted(model.end_ids)),
        len(loras),
        max((lora.rank for lora in loras), default=0),
        kept_free=3 * 4 * sum(tensor.numel() for each in learning for tensor in each.values()),
        head_size=head_size,
    )


@contextmanager
def _writing(what: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        raise EngineError(
            f"The files of {what} for vLLM cannot be written to {folder}: {error.strerror}. Free space there, or set "
            "TMPDIR to another folder."
        ) from error
