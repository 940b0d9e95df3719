"""Decode strategies: how the rows in flight on one model read tokens and compute the next logits.

`flat`    kapelle's own pass for the architecture (models/fast), with its own KV cache: `FlatRows`
`cache`   the model's own forward pass and KV cache, prompts padded on the left: `PaddedRows`
`reread`  every token recomputes its whole text with the training pass: `RereadRows`

`cache` is used if it reproduces the logits of whole texts in a test: prompts of different lengths are read together, some
tokens follow, and a row leaves. For a large model, a small random one is tested instead. State-space models fail this test
because their state includes padding, and so do caches that cannot drop a row.

Shapes: R rows, Q distinct prompts (per adapter), P prompt positions, N flat tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
from torch import Tensor

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
    """One prompt to continue."""

    adapter: str | None
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    begun: int = 0
    """Number of tokens at the end of the prompt that were sampled earlier and belong to the completion."""
    images: tuple[Image, ...] = ()
    """The images in the prompt."""


@dataclass(slots=True)
class RowOutput:
    """A row's result, filled in once it is finished; `finish_reason` is None until then."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    text: str | None = None
    """Text up to a stop string, if any, including tokens that were sampled earlier."""
    routing: Routing | None = None
    """Experts of prompt and completion, if the model records them."""


class Rows:
    """Rows in flight on one model: reads tokens and returns the logits of the next tokens."""

    @property
    def open(self) -> bool:
        """Whether prompts may join the rows in flight."""
        return True

    place_bytes = 0
    """Bytes per token in the KV cache; 0 if unknown."""

    @property
    def places_next(self) -> int:
        """Token places of the KV cache after the next step; 0 if unknown."""
        return 0

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Append rows and read their prompts; return logits `_RV` of their first tokens."""
        raise NotImplementedError

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        raise NotImplementedError

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; drop all others."""
        raise NotImplementedError

    @property
    def routes(self) -> bool:
        """Whether the experts of each token are recorded, so that all tokens must be read."""
        return False

    def routing(self, row: int, tokens: int) -> Routing | None:
        """Return the experts of the first tokens of a row; None if they are not recorded."""
        return None

    def leave(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Drop the finished rows at these indices (ascending); `completions` are their sampled tokens."""
        gone = set(rows)
        self.arrange([row for row in range(len(self)) if row not in gone])

    def __len__(self) -> int:
        """Return the number of rows in flight."""
        raise NotImplementedError


def _runs(lengths: Sequence[int], most: int) -> Iterator[range]:
    """Split texts into runs of at most `most` tokens, or of a single longer text."""
    first, filled = 0, 0
    for number, length in enumerate(lengths):
        if number > first and filled + length > most:
            yield range(first, number)
            first, filled = number, 0
        filled += length
    yield range(first, len(lengths))


PROMPT_CHUNK, GPU_PROMPT_CHUNK = 1024, 1 << 14
"""Prompt tokens of one pass (or a single longer prompt): few enough to fit a CPU's cache, or enough to use a GPU fully."""

LEAST_SLOTS, ROOMY = 8, 4
"""Number of slots of an adapter if steps are recorded: the minimum, and the maximum per row."""

STEM = 32
"""Minimum length of a common prefix of prompts that is read once for all of them."""


def keeps_rounded(model: LanguageModel) -> bool:
    """Return whether sampling keeps rounded copies of the float32 weights of a model that computes in half precision.

    True on a GPU, where reading weights takes most of a step.
    """
    return model.device.type == "cuda" and model.dtype != torch.float32 and model.sharded_pass is None


class FlatRows(Rows):
    """Rows of kapelle's own pass: prompts without padding, each distinct prompt once, in our own KV cache."""

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
        """Each row's adapter and prompt."""
        self._room: dict[str | None, int] = {}
        """Slots of each adapter, if steps are recorded."""
        self._slots: list[int] = []
        """Each row's."""
        self._slot_R: Tensor | None = None
        """The slots as a tensor if steps are recorded; None if rows are slots."""
        self._token_S: dict[int, Tensor] = {}
        """Mapping from the number of slots to the tensor from which recorded steps read their tokens."""
        self._assigned = True
        """Whether all rows have their slots."""
        self._route: Route = []

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def places_next(self) -> int:
        """Token places of the KV cache that are used after the next step."""
        return self._cache.places_next

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Read the new tokens of every distinct prompt once; return logits `_RV` of each row's first token."""
        flat, device, dtype = self._flat, self._model.device, self._model.dtype
        texts = [(job.adapter, job.prompt) for job in jobs]
        prompts = list(dict.fromkeys(texts))
        most = GPU_PROMPT_CHUNK if device.type == "cuda" else PROMPT_CHUNK
        block = PromptBlock(flat, [len(prompt) for _, prompt in prompts], device, dtype)
        known = [0] * len(prompts)
        """Number of tokens of each prompt that have cached keys and values."""
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
        self._cache.join(block, prompt_R)
        self._slots += range(self._cache.slots - len(texts), self._cache.slots)
        self._texts += texts
        self._assigned = False
        return logits_QV[torch.tensor(prompt_R, device=device)]

    def _read(
        self,
        block: PromptBlock,
        prompts: Sequence[Text],
        known: Sequence[int],
        chunk: range,
    ) -> Tensor:
        """Read the new tokens of a few prompts and return logits `_QV` of the tokens that follow."""
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
        """Read one more token of each row and return logits `_RV` of the next token, valid until the next call."""
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
        """Read a token by tensor operations only, because a replay runs no Python."""
        return self._logits(token_S, self._cache.advance(), self._route, self._cache.attend, None)

    def _logits(
        self, tokens_N: Tensor, positions_N: Tensor, route: Route, attend: Attend, last_Q: Tensor | None
    ) -> Tensor:
        if self._fused is not None:
            return self._fused.logits(tokens_N, positions_N, route, attend, last_Q)

        def scaled(layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
            return attend(layer, q_NHE * self._flat.scale, k_NJE, v_NJE)

        if self._rounded is None and keeps_rounded(self._model):
            self._rounded = RoundedWeights(self._model.model, self._model.dtype)
        with nullcontext() if self._rounded is None else self._rounded.standing_in():
            with self._model.computing(route):
                hidden_ND = self._flat.hidden(tokens_N, positions_N, scaled)
            if last_Q is not None:
                hidden_ND, route = hidden_ND[last_Q], route_at(route, last_Q)
            with self._model.computing(route):
                return self._model.logits(hidden_ND)

    def leave(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Drop rows, keeping their KV cache for later prompts: the prompt and all but the last sampled token."""
        read = [
            (self._texts[row][0], (*self._texts[row][1], *completion[:-1]))
            for row, completion in zip(rows, completions, strict=True)
        ]
        self._prefixes.put(self._cache, [self._slots[row] for row in rows], read)
        super().leave(rows, completions)

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; drop all others."""
        self._texts = [self._texts[row] for row in rows]
        self._slots = [self._slots[row] for row in rows]
        self._assign_slots()

    def _assign_slots(self) -> None:
        """Assign rows to slots.

        If steps are recorded, each adapter has a number of slots that seldom changes, some of them idle. A recording
        therefore still fits when rows join and leave.
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


def _shared_beginnings(prompts: Sequence[Text], known: Sequence[int]) -> dict[Text, list[int]]:
    """Return the common prefixes of new prompts, each with the prompts that share it."""
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
    """Return an empty cache that depends on the kind of layer: it keeps all tokens, those of a window, or a state."""
    from transformers import DynamicCache

    return DynamicCache(config=model.model.config)


class PaddedRows(Rows):
    """Rows of a `transformers` causal LM: prompts padded on the left, the library's own KV cache.

    `decode_strategy` tests whether this reproduces the model's own logits.
    """

    def __init__(self, model: LanguageModel, cache_of: CacheOf = plain_cache) -> None:
        """Use the cache that `cache_of` creates."""
        self._model = model
        self._cache_of = cache_of
        accepted = inspect.signature(model.body.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self._adapters: list[str | None] = []
        self._left: list[int] = []
        """Padding before each row's prompt."""
        self._experts_RPLk: list[Tensor] = []
        """The experts of each pass's tokens, if the model records them."""

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def routes(self) -> bool:
        """Whether the experts of each token are recorded."""
        return bool(self._experts_RPLk)

    def routing(self, row: int, tokens: int) -> Routing | None:
        """Return the experts of the first tokens of a row."""
        if not self.routes:
            return None
        first = self._left[row]
        return packed(torch.cat([each[row] for each in self._experts_RPLk])[first : first + tokens])

    @property
    def open(self) -> bool:
        """Whether no row is in flight, because the library's cache takes all prompts at once."""
        return not self._adapters

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Read every prompt and return logits `_RV` of its first new token."""
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
        """Return the positions `_RP` of the last `count` of `length` tokens."""
        place_P = torch.arange(length - count, length, device=self._pad_R.device)
        return (place_P[None] - self._pad_R[:, None]).clamp(min=0)

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        self._mask_RP = torch.cat([self._mask_RP, self._mask_RP.new_ones(len(token_R), 1)], dim=1)
        if self._model.vision is not None:
            token_R = self._model.vision.readable(token_R)
        return self._forward({"input_ids": token_R[:, None]}, self._place(1, self._mask_RP.shape[1]))

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep these rows; drop the others and their cache."""
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
"""Maximum tokens of one pass, if no text is longer."""


class RereadRows(Rows):
    """Rows without a KV cache: every step recomputes all texts.

    This is the slowest strategy, but correct for every model. It is used if a model's own cache does not reproduce the
    logits of whole texts.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._texts: list[tuple[str | None, list[int], tuple[Image, ...]]] = []

    def __len__(self) -> int:
        return len(self._texts)

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Read every prompt and return logits `_RV` of its first new token."""
        joining = [(job.adapter, list(job.prompt), job.images) for job in jobs]
        self._texts += joining
        return self._logits(joining)

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        for (_, text, _), token in zip(self._texts, token_R.tolist(), strict=True):
            text.append(token)
        return self._logits(self._texts)

    def arrange(self, rows: Sequence[int]) -> None:
        """Continue with these rows, in this order."""
        self._texts = [self._texts[row] for row in rows]

    def _logits(self, texts: Sequence[tuple[str | None, list[int], tuple[Image, ...]]]) -> Tensor:
        """Read whole texts, a few in each pass, and return logits `_RV` of the tokens that follow."""
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
"""Numbers of tokens of the prompts with which a cache is tested."""

TRIED_STEPS = 4
"""Number of tokens after the prompts; the second row leaves in the middle."""

TRIED_SIZE = 10_000_000
"""Maximum parameters of a model that is tested itself."""

CACHE_TOLERANCE = 1e-4
"""Maximum difference in float32, as a share of the norm of a row's logits."""


class DecodeStrategy(NamedTuple):
    """How a model decodes."""

    name: Literal["flat", "cache", "reread"]
    cache_of: CacheOf | None = None
    """Creates the KV cache of `cache`."""


def decode_strategy(model: LanguageModel) -> DecodeStrategy:
    """Return the fastest strategy that reproduces a model's logits; this tests the model's cache without adapters."""
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
    """Return whether decoding with a cache gives the same logits as a pass over the whole text.

    Both are computed in float32, where a small error can be told from rounding. They alternate, so that any state that a
    model keeps outside the cache is overwritten, as in training.
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
