"""Trains the adapters of all clients on one base model: ordered requests, mixed passes, optimiser steps and saved states.

Everything in this module runs on one thread, the thread of the rollout engine's event loop. A pass therefore never runs at
the same time as a decoding step, whose adapters it would change.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kapelle.errors import DataError, ModelError
from kapelle.models.adapters import adapted_layers, named
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import layers_of
from kapelle.models.weights import read_adapter, save_adapter
from kapelle.runtime.tensors import copy_together, load_tensors
from kapelle.services.binding import log_failure
from kapelle.services.request_errors import RequestError, wrong
from kapelle.services.tinker.passes import Example, Scored, packs, score
from kapelle.team import ALL_LINEAR, Lora

ALPHA = 32.0
"""The scaling factor of all adapters, which the protocol does not transmit."""
OPTIMIZER = "optimizer.safetensors"


@dataclass(slots=True)
class Work:
    """One request of a client: examples for the next mixed pass, or another action on the adapter."""

    answer: Callable[[Sequence[Scored]], Any]
    """A function that returns the result, given the results of the examples."""
    examples: Sequence[Example] = ()
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter that a client trains, with its optimiser and its waiting requests."""

    name: str
    lora: Lora
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    waiting: dict[int, Work] = field(default_factory=dict)
    """The requests by their sequence numbers. Requests may arrive in any order."""
    next: int = 1
    """The sequence number of the next request to execute."""
    dropped: bool = False
    """Whether gradients were lost since the last optimiser step."""

    def step(self, rate: float, betas: tuple[float, float], eps: float, decay: float, clip: float) -> float:
        """Take an AdamW step with these settings, and return the norm of the gradient before clipping.

        Raises RequestError (400) if gradients were lost or are not finite; the weights are then unchanged.
        """
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients)) if gradients else 0.0
        try:
            if self.dropped:
                raise wrong(
                    "A pass of this model failed, so its gradient is lost. Send the examples of this step again."
                )
            if norm - norm != 0:
                raise wrong(
                    "The gradient is not finite. Check the inputs of the loss; the weights are unchanged."
                )
            if clip > 0:
                nn.utils.clip_grads_with_norm_(self.parameters.values(), clip, torch.tensor(norm))
            self.optimizer.param_groups[0].update(lr=rate, betas=betas, eps=eps, weight_decay=decay)
            self.optimizer.step()
        finally:
            self.dropped = False
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def save(self, folder: Path, base: str, *, optimizer: bool) -> None:
        """Write the adapter as a PEFT folder, and the state of the optimiser beside it."""
        from safetensors.torch import save_file

        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        save_adapter(part, {key: each.detach() for key, each in self.parameters.items()}, self.lora, base)
        if optimizer:
            moments = {
                f"{moment}/{name}": value
                for name, parameter in self.parameters.items()
                for moment, value in self.optimizer.state.get(parameter, {}).items()
            }
            save_file(copy_together(moments), part / OPTIMIZER)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Replace the weights, and the state of the optimiser, which is otherwise reset. Pending gradients are dropped."""
        weights, lora = read_adapter(folder)
        if lora != self.lora:
            raise wrong(
                "The saved weights have another rank or other layers. Create a client from this state."
            )
        state: dict[nn.Parameter, dict[str, Tensor]] = {}
        if optimizer:
            try:
                moments = load_tensors(folder / OPTIMIZER)
            except DataError:
                raise wrong("These weights were saved without the optimiser. Load them without it.") from None
            for key, value in moments.items():
                moment, _, name = key.partition("/")
                parameter = self.parameters[name]
                place = None if moment == "step" else parameter.device
                state.setdefault(parameter, {})[moment] = value.to(place)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        self.optimizer.state.clear()
        for parameter, moments_of in state.items():
            self.optimizer.state[parameter] = moments_of
        self.optimizer.zero_grad(set_to_none=True)
        self.dropped = False


class Training:
    """Executes the requests of all adapters. Examples that wait at the same time are computed in mixed passes."""

    def __init__(self, model: LanguageModel, most_tokens: int, gather: float) -> None:
        """Train on a base model with at most `most_tokens` tokens in a pass.

        After a pause, wait `gather` seconds for the requests of other clients before the first pass.
        """
        self.model = model
        self.adapters: dict[str, Adapter] = {}
        self.passes = 0
        """The number of passes so far."""
        self.mixed = 0
        """The number of passes so far with examples of several adapters."""
        self._most, self._gather = most_tokens, gather
        self._single: list[Work] = []
        self._woken = asyncio.Event()

    def create(self, name: str, lora: Lora, seed: int) -> Adapter:
        """Add an adapter whose weights are drawn with a seed."""
        self.model.bank.add(name, lora, seed)
        parameters = self.model.bank.parameters(name)
        optimizer = torch.optim.AdamW(parameters.values(), foreach=True)
        self.adapters[name] = Adapter(name, lora, parameters, optimizer)
        return self.adapters[name]

    def remove(self, name: str) -> None:
        """Remove an adapter. Its waiting requests fail."""
        for work in self.adapters.pop(name).waiting.values():
            work.future.set_exception(wrong("The model was removed."))
        self.model.bank.remove(name)

    def submit(self, adapter: Adapter | None, sequence: int, work: Work) -> None:
        """Execute a request after all requests of its adapter with lower sequence numbers, or soon if there is no adapter."""
        if adapter is None:
            self._single.append(work)
        elif sequence >= adapter.next:
            adapter.waiting[sequence] = work
        else:
            work.future.set_exception(wrong("A later request was executed already.", "seq_id"))
        self._woken.set()

    async def work(self) -> None:
        """Execute requests until the task is cancelled."""
        while True:
            await self._woken.wait()
            await asyncio.sleep(self._gather)
            self._woken.clear()
            while found := self._next():
                await self._run(found)

    def _next(self) -> list[tuple[Adapter | None, Work]]:
        """Execute the next requests of each adapter that need no pass, and return the requests for the next passes."""
        found: list[tuple[Adapter | None, Work]] = [(None, work) for work in self._single]
        self._single = []
        for adapter in list(self.adapters.values()):
            passes = 0
            while (work := adapter.waiting.get(adapter.next)) is not None:
                if not work.examples and passes:
                    break  # an optimiser step needs the gradients of these passes
                adapter.next += 1
                del adapter.waiting[adapter.next - 1]
                if work.examples:
                    passes += 1
                    found.append((adapter, work))
                else:
                    _finish(work, ())
        return found

    async def _run(self, found: Sequence[tuple[Adapter | None, Work]]) -> None:
        """Compute the examples of these requests in mixed passes."""
        examples = [example for _, work in found for example in work.examples]
        scored: dict[int, Scored] = {}
        failed: set[str | None] = set()
        for chosen in packs(examples, self._most):
            await asyncio.sleep(0)  # decoding continues between passes
            own = [examples[k] for k in chosen]
            try:
                scored |= zip(chosen, score(self.model, own), strict=True)
            except Exception as error:  # noqa: BLE001 - the other passes continue
                log_failure("A pass failed.", error)
                failed.update(each.adapter for each in own if each.backward)
            self.passes += 1
            self.mixed += len({each.adapter for each in own}) > 1
        for name in failed:
            if name in self.adapters:
                self.adapters[name].dropped = True
        first = 0
        for _, work in found:
            rows = range(first, first + len(work.examples))
            first = rows.stop
            if all(k in scored for k in rows):
                _finish(work, [scored[k] for k in rows])
            else:
                work.future.set_exception(RequestError(500, "A pass failed; see the service's log."))

    async def score(self, example: Example) -> Scored:
        """Return the log-probs of one example, computed in a mixed pass."""
        work = Work(lambda scored: scored[0], [example])
        self.submit(None, 0, work)
        result: Scored = await asyncio.wrap_future(work.future)
        return result


def _finish(work: Work, scored: Sequence[Scored]) -> None:
    try:
        work.future.set_result(work.answer(scored))
    except RequestError as error:
        work.future.set_exception(error)
    except Exception as error:  # noqa: BLE001 - only this request fails
        log_failure("A request of a client failed.", error)
        work.future.set_exception(RequestError(500, "The request failed; see the service's log."))


def lora_of(model: LanguageModel, rank: int, *, attention: bool, mlp: bool) -> Lora:
    """Return the settings of an adapter of the attention layers, of the other linear layers, or of both.

    Raises RequestError (400) if no layer is left.
    """
    layers = layers_of(model.model)
    try:
        paths = adapted_layers(layers, (ALL_LINEAR,))
    except ModelError as error:
        raise wrong(str(error)) from None
    chosen = tuple(path for path in paths if (attention if "attn" in path else mlp))
    if not chosen:
        raise wrong("No layer is left to train. Set `train_attn` or `train_mlp`.", "lora_config")
    return named(layers, Lora(rank, ALPHA, chosen))
