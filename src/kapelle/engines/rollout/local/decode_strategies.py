"""Decode strategies, which define how the current rows of a model process tokens and compute the next logits.

- The strategy `flat` (`FlatRows`) uses kapelle's own forward pass for the architecture (models/fast), with its own KV cache.
- The strategy `cache` (`PaddedRows`) uses the model's own forward pass and KV cache, with prompts padded on the left.
- The strategy `reread` (`RereadRows`) recomputes whole texts in every step, with the forward pass of training.

The strategy `cache` is used if it passes a test in which it must reproduce the logits of whole texts. In the test,
prompts of different lengths are processed together, a few tokens follow, and one row is removed. For a large model, a
small random model of the same kind is tested instead. State-space models fail this test because their state includes
the padding. Caches from which no row can be removed fail as well.

In tensor shapes, R is the number of rows, Q of distinct prompts (per adapter), P of prompt positions and N of flat
tokens; D is the hidden size and V the size of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
from torch import Tensor

from kapelle.engines.rollout.local.decode_pass import DecodePass, slots_for
from kapelle.engines.rollout.local.step_graphs import GraphRecorder, Recordings
from kapelle.errors import ModelError
from kapelle.models.fast.attention import plan_sequences
from kapelle.models.fast.flat import Attend, FlatModel
from kapelle.models.fast.fused import FusedPass
from kapelle.models.fast.kv_cache import KVCache, Prefixes, PromptBlock, Text
from kapelle.models.language_model import LanguageModel, in_float32
from kapelle.models.lora_bank import Route, route_at, route_of
from kapelle.models.routing import packed
from kapelle.models.weight_files import small_model
from kapelle.models.weights import RoundedWeights
from kapelle.types import FinishReason, Image, Routing, Sampling

if TYPE_CHECKING:
    from transformers import Cache


class Job(NamedTuple):
    """A prompt for which a completion is sampled."""

    adapter: str | None
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    begun: int = 0
    """The number of tokens at the end of the prompt that were sampled earlier and belong to the completion."""
    images: tuple[Image, ...] = ()
    """The images that the prompt contains."""


@dataclass(slots=True)
class RowOutput:
    """The result of a row, which is filled in when the row is finished. The `finish_reason` of an unfinished row is None."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    text: str | None = None
    """The text before the stop string if one was found, including the text of tokens that were sampled earlier."""
    routing: Routing | None = None
    """The experts selected for the tokens of the prompt and the completion, if the model records them."""


class Rows:
    """The rows that are currently decoded on one model. A subclass processes tokens and returns the logits of the next tokens."""

    @property
    def open(self) -> bool:
        """Whether new prompts can join while other rows are being decoded."""
        return True

    place_bytes = 0
    """The number of bytes per token in the KV cache, or 0 if unknown."""

    @property
    def places_next(self) -> int:
        """The number of token slots that the KV cache uses after the next step, or 0 if unknown."""
        return 0

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Append rows and process their prompts. Returns the logits of the first new tokens, of shape (R, V)."""
        raise NotImplementedError

    def read(self, token_R: Tensor) -> Tensor:
        """Process one more token of each row and return the logits of the next tokens, of shape (R, V)."""
        raise NotImplementedError

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, in this order, and drop all other rows."""
        raise NotImplementedError

    @property
    def routes(self) -> bool:
        """Whether the experts of each token are recorded, in which case the model must process all tokens."""
        return False

    def routing(self, row: int, tokens: int) -> Routing | None:
        """Return the experts of the first `tokens` tokens of a row, or None if the experts are not recorded."""
        return None

    def leave(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Drop the finished rows at these ascending indices. The argument `completions` contains the sampled tokens of these rows."""
        gone = set(rows)
        self.arrange([row for row in range(len(self)) if row not in gone])

    def __len__(self) -> int:
        """Return the number of rows that are currently decoded."""
        raise NotImplementedError


def _runs(lengths: Sequence[int], most: int) -> Iterator[range]:
    """Split texts into consecutive groups of at most `most` tokens. A text that is longer than `most` forms its own group."""
    first, filled = 0, 0
    for number, length in enumerate(lengths):
        if number > first and filled + length > most:
            yield range(first, number)
            first, filled = number, 0
        filled += length
    yield range(first, len(lengths))


PROMPT_CHUNK, GPU_PROMPT_CHUNK = 1024, 1 << 14
"""The maximum number of prompt tokens in one forward pass on a CPU and on a GPU. A prompt that is longer than this
maximum gets a separate pass. The values are small enough for the cache of a CPU and large enough to use a GPU fully."""

LEAST_SLOTS, ROOMY = 8, 4
"""The minimum number of slots of an adapter, and the maximum number of slots per row, if steps are recorded."""

STEM = 32
"""The minimum length of a common prefix of prompts that is processed once for all of these prompts."""


def keeps_rounded(model: LanguageModel) -> bool:
    """Return whether sampling keeps copies of the float32 weights rounded to the half precision in which the model computes.

    The result is True on a GPU, where reading weights takes most of the time of a step.
    """
    return model.device.type == "cuda" and model.dtype != torch.float32 and model.sharded_pass is None


class FlatRows(Rows):
    """Rows of kapelle's own forward pass, which processes each distinct prompt once, without padding, with its own KV cache."""

    def __init__(
        self,
        model: LanguageModel,
        flat: FlatModel,
        fused: FusedPass | None,
        prefixes: Prefixes,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self._model = model
        self._recordings = None if recorder is None else Recordings(recorder)
        self._flat = flat
        self._fused = fused
        self._prefixes = prefixes
        self._rounded: RoundedWeights | None = None
        # Results on a GPU are the same with and without recordings.
        self._steady = recorder is not None or model.device.type == "cuda"
        self._cache = KVCache(flat, model.device, model.dtype, steady=self._steady)
        self.place_bytes = 2 * len(flat.layers) * flat.key_heads * flat.head_size * model.dtype.itemsize
        self._texts: list[Text] = []
        """The adapter and the prompt of each row."""
        self._room: dict[str | None, int] = {}
        """The number of slots of each adapter, if steps are recorded."""
        self._slots: list[int] = []
        """The slot of each row."""
        self._slot_R: Tensor | None = None
        """The slot of each row as a tensor if steps are recorded, or None if rows and slots are the same."""
        self._token_S: dict[int, Tensor] = {}
        """Mapping from the number of slots to the tensor from which recorded steps read their tokens."""
        self._assigned = True
        """Whether every row has been assigned to a slot."""
        self._route: Route = []

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def places_next(self) -> int:
        """The number of token slots that the KV cache uses after the next step."""
        return self._cache.places_next

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Process the new tokens of every distinct prompt once and return the logits of each row's first token, of shape (R, V)."""
        flat, device, dtype = self._flat, self._model.device, self._model.dtype
        texts = [(job.adapter, job.prompt) for job in jobs]
        prompts = list(dict.fromkeys(texts))
        most = GPU_PROMPT_CHUNK if device.type == "cuda" else PROMPT_CHUNK
        block = PromptBlock(flat, [len(prompt) for _, prompt in prompts], device, dtype)
        known = [0] * len(prompts)
        """The number of tokens of each prompt whose keys and values are already in the cache."""
        for number, (adapter, prompt) in enumerate(prompts):
            kv = self._prefixes.find(adapter, prompt)
            if kv is not None:
                known[number] = block.put(number, kv)

        # Common prefixes of new prompts (an agent's instructions) are read once and copied to each prompt.
        shared = _shared_beginnings(prompts, known)
        if shared:
            stems = list(shared)
            room = PromptBlock(flat, [len(stem) for _, stem in stems], device, dtype)
            for chunk in _runs([len(stem) for _, stem in stems], most):
                self._read(room, stems, [0] * len(stems), chunk)
            for number, stem in enumerate(stems):
                for place in shared[stem]:
                    known[place] = block.put(place, room.of(number))

        new = [len(prompt) - read for (_, prompt), read in zip(prompts, known, strict=True)]
        logits_QV = torch.cat([self._read(block, prompts, known, chunk) for chunk in _runs(new, most)])
        number_of = {prompt: number for number, prompt in enumerate(prompts)}
        prompt_R = [number_of[text] for text in texts]
        self._store(block, prompt_R, [adapter for adapter, _ in texts])
        self._texts += texts
        return logits_QV[torch.tensor(prompt_R, device=device)]

    def _store(self, block: PromptBlock, prompt_R: Sequence[int], _adapters: Sequence[str | None]) -> None:
        """Append rows to the KV cache, given their processed prompts, the index of each row's prompt, and the rows' adapters."""
        self._cache.join(block, prompt_R)
        self._slots += range(self._cache.slots - len(prompt_R), self._cache.slots)
        self._assigned = False

    def _read(
        self,
        block: PromptBlock,
        prompts: Sequence[Text],
        known: Sequence[int],
        chunk: range,
    ) -> Tensor:
        """Process the new tokens of a few prompts and return the logits of the tokens that follow, of shape (Q, V)."""
        device = self._model.device
        new = [len(prompts[q][1]) - known[q] for q in chunk]
        tokens_N = torch.tensor([token for q in chunk for token in prompts[q][1][known[q] :]], device=device)
        position_N = torch.cat([torch.arange(known[q], len(prompts[q][1]), device=device) for q in chunk])
        last_Q = torch.tensor(new, device=device).cumsum(0) - 1
        spans: list[tuple[int, int, int]] = []
        for length, run in groupby(
            new
        ):  # attention is computed in one call for prompts with the same number of new tokens
            first = spans[-1][1] if spans else chunk.start
            spans.append((first, first + len(list(run)), length))
        attend = block.attention(spans)
        route = route_of([prompts[q][0] for q, n in zip(chunk, new, strict=True) for _ in range(n)])
        return self._logits(tokens_N, position_N, route, attend, last_Q)

    def read(self, token_R: Tensor) -> Tensor:
        """Process one more token of each row and return the logits of the next tokens, of shape (R, V), valid until the next call."""
        if not self._assigned:
            self._assign_slots()
        self._cache.open()  # outside of the recorded step
        if self._slot_R is None:
            return self._step(token_R)
        slots = self._cache.slots
        if slots not in self._token_S:
            self._token_S[slots] = token_R.new_zeros(slots)
        token_S = self._token_S[slots]
        token_S.index_copy_(0, self._slot_R, token_R)
        if self._recordings is None:
            logits_SV = self._step(token_S)
        else:
            kind = self._cache.shape, tuple(self._route)
            logits_SV = self._recordings.run(kind, lambda: self._step(token_S))
        return logits_SV.index_select(0, self._slot_R)

    def _step(self, token_S: Tensor) -> Tensor:
        """Process one token per slot using tensor operations only, because replaying a recording runs no Python code."""
        return self._logits(token_S, self._cache.advance(), self._route, self._cache.attend, None)

    def _logits(
        self, tokens_N: Tensor, positions_N: Tensor, route: Route, attend: Attend, last_Q: Tensor | None
    ) -> Tensor:
        if self._fused is not None:
            return self._fused.logits(tokens_N, positions_N, route, attend, last_Q)

        def scaled(layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
            return attend(layer, q_NHE * self._flat.scale, k_NJE, v_NJE)

        with self._rounding():
            with self._model.computing(route):
                hidden_ND = self._flat.hidden(tokens_N, positions_N, scaled)
            if last_Q is not None:
                hidden_ND, route = hidden_ND[last_Q], route_at(route, last_Q)
            if not self._model.float_head:
                with self._model.computing(route):
                    return self._model.logits(hidden_ND)
        with self._model.computing(route):
            return self._model.logits(hidden_ND)  # with weights that are not rounded

    def _rounding(self) -> AbstractContextManager[None]:
        """Return a context in which layers use weights rounded to the compute type, if sampling keeps such weights."""
        if self._rounded is None and keeps_rounded(self._model):
            self._rounded = RoundedWeights(self._model.model, self._model.dtype)
        return nullcontext() if self._rounded is None else self._rounded.standing_in()

    def leave(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Drop finished rows, but keep the KV cache of the prompt and of all but the last sampled token for later prompts."""
        read = [
            (self._texts[row][0], (*self._texts[row][1], *completion[:-1]))
            for row, completion in zip(rows, completions, strict=True)
        ]
        self._keep(rows, read)
        super().leave(rows, completions)

    def _keep(self, rows: Sequence[int], texts: Sequence[Text]) -> None:
        """Keep the KV cache of rows with these texts for later prompts."""
        self._prefixes.put(self._cache, [self._slots[row] for row in rows], texts)

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, in this order, and drop all other rows."""
        self._texts = [self._texts[row] for row in rows]
        self._slots = [self._slots[row] for row in rows]
        self._assign_slots()

    def _assign_slots(self) -> None:
        """Assign each row to a slot.

        If steps are recorded, each adapter has a number of slots that seldom changes, and some of the slots are idle. A
        recording therefore remains valid when rows join and leave.
        """
        self._assigned = True
        if not self._steady:
            self._cache.arrange(self._slots)
            self._slots = list(range(len(self)))
            self._route = route_of([adapter for adapter, _ in self._texts])
            return
        row_of_slot: list[int | None] = []
        slots: list[int] = []
        self._route = []
        rows = iter(self._slots)
        for adapter, texts in groupby(self._texts, key=lambda text: text[0]):
            count, room = len(list(texts)), self._room.get(adapter, 0)
            if not count <= room <= ROOMY * count:
                room = self._room[adapter] = max(LEAST_SLOTS, 1 << (count - 1).bit_length())
            first = len(row_of_slot)
            slots += range(first, first + count)
            row_of_slot += [next(rows) for _ in range(count)] + [None] * (room - count)
            self._route.append((adapter, first, first + room))
        self._cache.arrange(row_of_slot)
        self._slots, self._slot_R = slots, torch.tensor(slots, device=self._model.device)


class PagedRows(FlatRows):
    """Rows of kapelle's own forward pass whose decoding steps are a few kernels (decode_pass.py)."""

    def __init__(
        self,
        model: LanguageModel,
        flat: FlatModel,
        decode: DecodePass,
        prefixes: Prefixes,
        recordings: Recordings | None,
    ) -> None:
        super().__init__(model, flat, None, prefixes)
        self._decode, self._recordings = decode, recordings
        self._paged = decode.cache()
        self._weights: tuple[int, ...] | None = None
        """The addresses of the base weights."""

    @property
    def places_next(self) -> int:
        """The number of token slots that the KV cache uses after the next step."""
        return self._paged.places_next

    def read(self, token_R: Tensor) -> Tensor:
        """Process one more token of each row and return the logits of the next tokens, of shape (R, V), valid until the next call."""
        slots = slots_for(len(self))
        self._decode.adapters.refresh()
        self._paged.open(slots)
        self._decode.put(token_R, slots)
        with self._rounding():
            if self._weights is None:
                self._weights = self._decode.weights()
        if self._recordings is None:
            logits_SV = self._step_of(slots)
        else:
            kind = slots, *self._decode.memory(), *self._weights
            logits_SV = self._recordings.run(kind, lambda: self._step_of(slots))
        return logits_SV[: len(self)]

    def _step_of(self, slots: int) -> Tensor:
        with self._rounding():
            hidden_SD = self._decode.hidden(slots)
            if not self._model.float_head:
                return self._model.logits(hidden_SD)
        return self._model.logits(hidden_SD)  # with weights that are not rounded

    def _store(self, block: PromptBlock, prompt_R: Sequence[int], adapters: Sequence[str | None]) -> None:
        self._paged.join(block, prompt_R, [self._decode.adapters.place_of(each) for each in adapters])

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, in this order, and drop all other rows."""
        self._texts = [self._texts[row] for row in rows]
        self._paged.arrange(rows)

    def _keep(self, rows: Sequence[int], texts: Sequence[Text]) -> None:
        self._prefixes.put(self._paged, rows, texts)


def _shared_beginnings(prompts: Sequence[Text], known: Sequence[int]) -> dict[Text, list[int]]:
    """Return a mapping from each common prefix of new prompts to the indices of the prompts that share this prefix."""
    alike: dict[Text, list[int]] = {}
    for number, (adapter, prompt) in enumerate(prompts):
        if not known[number] and len(prompt) > STEM:
            alike.setdefault((adapter, prompt[:STEM]), []).append(number)
    shared: dict[Text, list[int]] = {}
    for (adapter, _), numbers in alike.items():
        texts = [prompts[number][1] for number in numbers]
        first, last = min(texts), max(texts)  # their common prefix is that of all
        most = min(len(text) for text in texts) - 1  # at least one token of every prompt must be read
        same = next((k for k in range(STEM, most) if first[k] != last[k]), most)
        if len(numbers) > 1:
            shared[adapter, first[:same]] = numbers
    return shared


CacheOf = Callable[[LanguageModel], "Cache"]


def plain_cache(_model: LanguageModel) -> Cache:
    """Return an empty KV cache that keeps every token in every layer."""
    from transformers import DynamicCache

    return DynamicCache()


def cache_by_layer(model: LanguageModel) -> Cache:
    """Return an empty cache that stores what each layer needs: all tokens, the tokens of a window, or a state."""
    from transformers import DynamicCache

    return DynamicCache(config=model.model.config)


class PaddedRows(Rows):
    """Rows of a causal LM of `transformers`, with prompts padded on the left and the library's own KV cache.

    The function `decode_strategy` tests whether this strategy reproduces the logits of the model.
    """

    def __init__(self, model: LanguageModel, cache_of: CacheOf = plain_cache) -> None:
        """Create rows that use the cache created by `cache_of`."""
        self._model = model
        self._cache_of = cache_of
        accepted = inspect.signature(model.body.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self._adapters: list[str | None] = []
        self._left: list[int] = []
        """The number of padding tokens before the prompt of each row."""
        self._experts_RPLk: list[Tensor] = []
        """The experts selected for the tokens of each forward pass, if the model records them."""

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def routes(self) -> bool:
        """Whether the experts of each token are recorded."""
        return bool(self._experts_RPLk)

    def routing(self, row: int, tokens: int) -> Routing | None:
        """Return the experts of the first `tokens` tokens of a row."""
        if not self.routes:
            return None
        first = self._left[row]
        return packed(torch.cat([each[row] for each in self._experts_RPLk])[first : first + tokens])

    @property
    def open(self) -> bool:
        """Whether no row is being decoded, because the library's cache requires that all prompts are added at once."""
        return not self._adapters

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Process every prompt and return the logits of each first new token, of shape (R, V)."""
        assert self.open, "rows join only when no others are in flight"
        self._adapters = [job.adapter for job in jobs]
        self._cache = self._cache_of(self._model)
        longest = max(len(job.prompt) for job in jobs)
        pad = [longest - len(job.prompt) for job in jobs]
        self._left, self._experts_RPLk = list(pad), []
        rows = [(0,) * p + job.prompt for p, job in zip(pad, jobs, strict=True)]
        self._pad_R = torch.tensor(pad, device=self._model.device)
        self._mask_RP = (
            torch.arange(longest, device=self._model.device)[None] >= self._pad_R[:, None]
        ).long()
        tokens_RP = torch.tensor(rows, device=self._model.device)
        if self._model.vision is None:
            return self._forward({"input_ids": tokens_RP}, self._place(longest, longest))
        named, positions, shift_R = self._model.vision.inputs(tokens_RP, pad, [job.images for job in jobs])
        self._pad_R -= shift_R  # for later tokens, because an image has fewer positions than tokens
        return self._forward(named, positions)

    def _place(self, count: int, length: int) -> Tensor:
        """Return the positions of the last `count` of `length` tokens in each row, of shape (R, P)."""
        place_P = torch.arange(length - count, length, device=self._pad_R.device)
        return (place_P[None] - self._pad_R[:, None]).clamp(min=0)

    def read(self, token_R: Tensor) -> Tensor:
        """Process one more token of each row and return the logits of the next tokens, of shape (R, V)."""
        self._mask_RP = torch.cat([self._mask_RP, self._mask_RP.new_ones(len(token_R), 1)], dim=1)
        if self._model.vision is not None:
            token_R = self._model.vision.readable(token_R)
        return self._forward({"input_ids": token_R[:, None]}, self._place(1, self._mask_RP.shape[1]))

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, and drop the other rows together with their cache."""
        self._adapters = [self._adapters[row] for row in rows]
        self._left = [self._left[row] for row in rows]
        kept_R = torch.tensor(rows, dtype=torch.long, device=self._pad_R.device)
        self._experts_RPLk = [each[kept_R] for each in self._experts_RPLk]
        self._cache.reorder_cache(cast("torch.LongTensor", kept_R))
        self._mask_RP, self._pad_R = self._mask_RP[kept_R], self._pad_R[kept_R]

    def _forward(self, inputs: dict[str, Tensor], positions: Tensor) -> Tensor:
        choices = self._model.choices
        with (
            self._model.computing(route_of(self._adapters)),
            choices.recording() if choices else nullcontext() as taken,
        ):
            output = self._model.body(
                **inputs,
                position_ids=positions,
                attention_mask=self._mask_RP,
                use_cache=True,
                **{self._cache_name: self._cache},
            )
            if taken is not None:
                self._experts_RPLk.append(taken().unflatten(0, inputs["input_ids"].shape))
            return self._model.logits(output.last_hidden_state[:, -1])


REREAD_TOKENS = 1 << 14
"""The maximum number of tokens in one forward pass. A text that is longer than this maximum gets a separate pass."""


class RereadRows(Rows):
    """Rows without a KV cache: every step recomputes all texts from the beginning.

    This strategy is the slowest, but it is correct for every model. The strategy is used if the model's own cache does
    not reproduce the logits of whole texts.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._texts: list[tuple[str | None, list[int], tuple[Image, ...]]] = []

    def __len__(self) -> int:
        return len(self._texts)

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Process every prompt and return the logits of each first new token, of shape (R, V)."""
        joining = [(job.adapter, list(job.prompt), job.images) for job in jobs]
        self._texts += joining
        return self._logits(joining)

    def read(self, token_R: Tensor) -> Tensor:
        """Process one more token of each row and return the logits of the next tokens, of shape (R, V)."""
        for (_, text, _), token in zip(self._texts, token_R.tolist(), strict=True):
            text.append(token)
        return self._logits(self._texts)

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, in this order, and drop all other rows."""
        self._texts = [self._texts[row] for row in rows]

    def _logits(self, texts: Sequence[tuple[str | None, list[int], tuple[Image, ...]]]) -> Tensor:
        """Process whole texts, a few per forward pass, and return the logits of the tokens that follow, of shape (R, V)."""
        device = self._model.device
        logits: list[Tensor] = []
        for run in _runs([len(text) for _, text, _ in texts], REREAD_TOKENS):
            chosen = texts[run.start : run.stop]
            lengths = [len(text) for _, text, _ in chosen]
            begins = [0, *accumulate(lengths)]
            images = {begin: seen for begin, (_, _, seen) in zip(begins, chosen, strict=False) if seen}
            tokens_N = torch.tensor([token for _, text, _ in chosen for token in text], device=device)
            positions_N = torch.cat([torch.arange(length, device=device) for length in lengths])
            route = route_of([adapter for adapter, text, _ in chosen for _ in text])
            with self._model.computing(route):
                hidden_ND = self._model.hidden(
                    tokens_N, positions_N, plan_sequences(lengths, device), images=images
                )
                last_R = torch.tensor(lengths, device=device).cumsum(0) - 1
                logits.append(self._model.logits(hidden_ND[last_R]))
        return torch.cat(logits)


TRIED_PROMPTS = (9, 5, 7)
"""The lengths in tokens of the prompts with which a cache is tested."""

TRIED_STEPS = 4
"""The number of tokens that follow the prompts in the test of a cache. The second row is removed after half of these
tokens."""

TRIED_SIZE = 10_000_000
"""The maximum number of parameters of a model that is tested directly. For larger models, a small random model is
tested."""

CACHE_TOLERANCE = 1e-4
"""The maximum difference between the logits of a row in float32, relative to the norm of the row's logits."""


class DecodeStrategy(NamedTuple):
    """The way in which a model decodes."""

    name: Literal["flat", "cache", "reread"]
    cache_of: CacheOf | None = None
    """The function that creates the KV cache for the strategy `cache`."""


def decode_strategy(model: LanguageModel) -> DecodeStrategy:
    """Return the fastest strategy that reproduces the logits of a model. The model's own cache is tested without adapters."""
    if model.flat is not None:
        return DecodeStrategy("flat")
    if model.vision is None and sum(weight.numel() for weight in model.model.parameters()) > TRIED_SIZE:
        with suppress(ModelError):
            small = small_model(model.model.config, type(model.model), model.tokenizer, TRIED_SIZE)
            model = model if small is None else small.to(str(model.device))
    for cache_of in (plain_cache, cache_by_layer):
        if _cache_agrees(model, cache_of):
            return DecodeStrategy("cache", cache_of)
    return DecodeStrategy("reread")


@torch.inference_mode()
def _cache_agrees(model: LanguageModel, cache_of: CacheOf) -> bool:
    """Return whether decoding with a cache gives the same logits as a forward pass over the whole text.

    Both results are computed in float32, where an error can be distinguished from rounding. The two computations
    alternate, so that any state that a model keeps outside the cache is overwritten, as in training.
    """
    words = int(model.model.get_input_embeddings().weight.shape[0])
    count = sum(TRIED_PROMPTS) + TRIED_STEPS * len(TRIED_PROMPTS)
    drawn = torch.randint(words, (count,), generator=torch.Generator().manual_seed(0))
    prompts: Sequence[Tensor] = drawn[: sum(TRIED_PROMPTS)].split(TRIED_PROMPTS)
    jobs = [Job(None, tuple(prompt.tolist()), Sampling(), 0) for prompt in prompts]
    staying = list(range(len(jobs)))
    try:
        with in_float32(model):
            cached, reread = PaddedRows(model, cache_of), RereadRows(model)
            pairs = [(cached.join(jobs), reread.join(jobs))]
            for step, token_R in enumerate(
                drawn[sum(TRIED_PROMPTS) :].view(TRIED_STEPS, -1).to(model.device)
            ):
                if step == TRIED_STEPS // 2:
                    staying = [0, 2]
                    for rows in (cached, reread):
                        rows.leave([1], [()])
                pairs.append((cached.read(token_R[staying]), reread.read(token_R[staying])))
            return all(
                bool(((found_RV - right_RV).norm(dim=1) / right_RV.norm(dim=1) <= CACHE_TOLERANCE).all())
                for found_RV, right_RV in pairs
            )
    except Exception:  # noqa: BLE001 - caches of transformers may raise anything
        return False
