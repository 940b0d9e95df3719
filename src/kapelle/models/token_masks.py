"""Compute which tokens a constraint allows next, for the tokeniser of one model. Only this module uses llguidance.

A mask is computed from the constraint and the tokens sampled so far. The same function is used when tokens are sampled
and when they are scored for training. Sampling and training therefore use the same distribution, and recorded turns do
not need to store masks. Grammars are compiled once and cached. Each completion advances through its own copy of the
grammar.

Two kinds of special tokens are allowed: tokens that end a turn, exactly where the text is complete, and tokens that
mark tool calls, where a forced call contains the mark. If a text can neither end nor continue (because bytes are
missing in the vocabulary, or the grammar exceeds `LIMITS`), the turn ends.

In tensor shapes, R is the number of rows, T of tokens of a completion, V the size of the vocabulary, and W = ⌈V / 32⌉
the number of words. Each word contains one bit for each of 32 tokens, least significant bit first.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import takewhile
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kapelle.errors import AbsentPackage, ConfigError
from kapelle.runtime.constraints import CALL_MARKS, Tokenise, lark_of
from kapelle.types import Constraint

LOG = logging.getLogger(__name__)

Bits = npt.NDArray[np.int32]

LIMITS: Mapping[str, int | bool] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""The limits of a grammar in llguidance's units, which correspond to about ten milliseconds per step and 100 MB."""

COMPILED = 256
"""The maximum number of cached grammars. If there are more grammars, the least recently used grammar is dropped."""

KEPT_BYTES = 1 << 26
"""The maximum size in bytes of the masks of completions that are cached for the next pass over the same tokens."""

SHARED, SHORT = 1 << 12, 1 << 11
"""The maximum number of cached prefixes of choices, and the maximum number of characters of choices whose completions
share prefixes. If more prefixes are cached, all of them are dropped. Prefixes of longer choices are not shared, because
few would be used twice."""

MANY_TOKENS, MANY_ROWS = 1 << 12, 4
"""The numbers of tokens and rows from which several threads compute masks."""


def check_installed() -> None:
    """Raise ConfigError if llguidance is not installed."""
    if find_spec("llguidance") is None:
        raise AbsentPackage(
            "Constrained sampling needs the package llguidance. Install it: `pip install 'kapelle[constrain]'`."
        )


def check_constraint(constraint: Constraint) -> None:
    """Raise ConfigError if llguidance rejects a constraint or no text can satisfy the constraint, independently of the model."""
    check_installed()
    from llguidance import LLTokenizer

    compiled(constraint, LLTokenizer("byte"))


def unsupported_reason(constraint: Constraint) -> str | None:
    """Return the reason why `check_constraint` rejects a constraint, or None if the constraint is accepted."""
    check_installed()
    from llguidance import LLTokenizer

    return _tried(constraint, LLTokenizer("byte"))[1]


def compiled(
    constraint: Constraint,
    tokenizer: Any,
    marks: Mapping[str, int] | None = None,
    tokenise: Tokenise | None = None,
) -> Any:
    """Return llguidance's grammar for a constraint in its initial state.

    The mapping `marks` contains the special tokens that forced calls may contain. The function `tokenise` returns the
    tokens of a choice. Raises ConfigError if the constraint is rejected or no token can begin a text that satisfies it.
    """
    matcher, reason = _tried(constraint, tokenizer, marks, tokenise)
    if reason is None:
        return matcher
    shown = constraint.text if len(constraint.text) <= 60 else f"{constraint.text[:60]}…"
    raise ConfigError(f"The constraint {constraint.kind} {shown!r} is not supported: {reason}.")


def _tried(
    constraint: Constraint,
    tokenizer: Any,
    marks: Mapping[str, int] | None = None,
    tokenise: Tokenise | None = None,
) -> tuple[Any, str | None]:
    """Return llguidance's grammar for a constraint, and the reason if the constraint is rejected or None otherwise."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, lark_of(constraint, marks, tokenise), log_level=0, limits=_limits())
    message = matcher.get_error()
    if not message:
        first = matcher.deep_copy()
        first.compute_bitmask()
        if not first.is_error():
            return matcher, None
        message = "no text satisfies it, or no token can begin such a text"
    # Extract the reason, without the excerpts of the grammar around it.
    lines = list(takewhile(lambda line: not re.match(r"\s*\d+ \||<", line), message.splitlines()))
    reason = re.sub(
        r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(" ".join(lines).split())
    )
    return matcher, reason[:300].rstrip(".")


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)  # type: ignore[arg-type]


FAR, NEAR = 1024, 64
"""The maximum number of tokens in the first text that `fits` tries, and in the texts of its search for a short text."""

WIDTH, TRIED, FEW = 16, 12, (4, 6)
"""Limits of the search for a short text: the number of texts at a time, and the number of shortest and of longest
tokens that continue each text. The last pair replaces both numbers after the search has excluded a text."""


class _TokenBytes:
    """A vocabulary in the form that llguidance reads.

    llguidance tokenises strings only to force tokens, which this module does not use.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, words: Sequence[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = words, end

    def __call__(self, text: str) -> Sequence[int]:
        raise AssertionError("no token is forced")


class _Beginning:
    """A prefix of a text with its cached masks. Choices have few prefixes, and many completions share them."""

    __slots__ = ("after", "bits_W", "ending", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.bits_W: Bits | None = None
        """The mask of the tokens that may follow, or None if the mask has not been computed."""
        self.ending: tuple[int, ...] | None = None
        """The only possible continuation, including the end of turn. The tuple is empty if several continuations are
        possible, and the value is None if the continuation has not been computed."""
        self.after: dict[int, _Beginning] = {}


class Walk:
    """The state of one completion in its grammar."""

    __slots__ = ("beginning", "matcher")

    def __init__(self, matcher: Any, beginning: _Beginning | None = None) -> None:
        self.matcher, self.beginning = matcher, beginning
        """The matcher, which belongs either to this walk or to a prefix that other walks share."""

    def take(self, token: int) -> None:
        """Append a token that the grammar allows."""
        here = self.beginning
        if here is None:
            _consume(self.matcher, token)
            return
        after = here.after.get(token)
        if after is None:
            after = here.after[token] = _Beginning(here.matcher.deep_copy())
            _consume(after.matcher, token)
        self.beginning, self.matcher = after, after.matcher

    @property
    def complete(self) -> bool:
        """Whether the text may end at the current position."""
        return bool(self.matcher.is_accepting())


def _consume(matcher: Any, token: int) -> None:
    if not matcher.consume_token(token) and not matcher.is_stopped():
        LOG.warning("A constraint allows no further token, so its turn ends: %s", matcher.get_error()[:200])


class TokenMasks:
    """The token masks of one vocabulary."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int]) -> None:
        """Read the tokens of a fast tokeniser, for logits of `size` tokens. The tokens in `ends` end a turn."""
        self._tokenizer, self._size, self._ends = tokenizer, size, sorted(ends)
        self.words = -(-size // 32)
        """The number of words of 32 tokens in a mask (W)."""
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._beginnings: dict[Constraint, _Beginning] = {}
        """Mapping from choices to their empty prefix."""
        self._shared = 0
        """The number of prefixes with cached masks."""
        self._adding = threading.Lock()
        self._fits: dict[tuple[Constraint, int], bool | None] = {}
        self._kept: OrderedDict[tuple[Constraint, tuple[int, ...]], Bits] = OrderedDict()
        self._kept_bytes = 0

    @cached_property
    def _read(self) -> tuple[Any, Bits]:
        """Return llguidance's tokeniser, and the mask of all tokens that can ever be allowed, of shape (W,)."""
        check_installed()
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"The tokeniser of '{self._tokenizer.name_or_path}' has no `tokenizer.json`, which constraints need. "
                "Remove the constraints, or save the tokeniser as a fast tokeniser of transformers."
            )
        try:
            found = LLTokenizer(backend.to_str(), n_vocab=self._size, eos_token=self._ends)
        except ValueError as error:
            raise ConfigError(
                f"llguidance cannot read the tokeniser of '{self._tokenizer.name_or_path}' ({str(error)[:200]}). Remove the constraints."
            ) from None
        words = [
            b"" if found.is_special_token(token) else found.decode_bytes([token])
            for token in range(self._size)
        ]
        # The library treats anything like `<tool_call>` as special; the tokeniser defines which tokens really are.
        for token, added in backend.get_added_tokens_decoder().items():
            if token < self._size:
                words[token] = b"" if added.special else added.content.encode()
        # The library marks special tokens with this byte, which no text contains.
        words = [b"" if b"\xff" in word else word for word in words]
        allowed = np.zeros(self.words * 32, dtype=np.uint8)
        allowed[: self._size] = [bool(word) for word in words]
        allowed[[*self._ends, *self._marks.values()]] = 1
        read = LLTokenizer(cast("Any", _TokenBytes(words, self._ends[0])), eos_token=self._ends)
        return read, np.packbits(allowed, bitorder="little").view(np.int32)

    @cached_property
    def _marks(self) -> Mapping[str, int]:
        """Mapping from text to token id for special tokens that mark tool calls.

        Only the rule of a mark in a grammar may produce its token.
        """
        backend = self._tokenizer.backend_tokenizer
        return {
            added.content: token
            for token, added in backend.get_added_tokens_decoder().items()
            if added.special
            and added.content in CALL_MARKS
            and token < self._size
            and token not in self._ends
        }

    def _tokens(self, text: str) -> Sequence[int]:
        """Return the tokeniser's tokens of a text, or an empty sequence if the tokens do not spell exactly this text.

        The tokens may differ from the text because of an added space or a special token.
        """
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self._read[0].decode_bytes(ids) == text.encode() else ()

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor()

    def begin(self, constraint: Constraint, ids: Sequence[int] = ()) -> Walk:
        """Return a walk that has advanced over these tokens. Raises ConfigError if llguidance rejects the constraint.

        This method can be called from any thread.
        """
        with self._adding:
            found = self._compiled.get(constraint)
            if found is None:
                found = self._compiled[constraint] = compiled(
                    constraint, self._read[0], self._marks, self._tokens
                )
                if len(self._compiled) > COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(constraint)
        if constraint.kind == "choices" and len(constraint.text) <= SHORT:
            beginning = self._beginnings.get(constraint)
            if beginning is None:
                beginning = self._beginnings[constraint] = _Beginning(found.deep_copy())
            walk = Walk(beginning.matcher, beginning)
        else:
            walk = Walk(found.deep_copy())
        for token in ids:
            walk.take(token)
        return walk

    def next(self, walks: Sequence[Walk]) -> Bits:
        """Return the masks of the tokens that are allowed next in each walk, of shape (R, W)."""
        bits_RW = np.empty((len(walks), self.words), dtype=np.int32)
        first_rows: dict[int, int] = {}
        """Mapping from the identity of a matcher to the first row that needs the matcher's mask."""
        copies: list[tuple[int, int]] = []
        for row, walk in enumerate(walks):
            here = walk.beginning
            if here is not None and here.bits_W is not None:
                bits_RW[row] = here.bits_W
            elif (first := first_rows.setdefault(id(walk.matcher), row)) != row:
                copies.append((row, first))
        if first_rows:
            self._compute(walks, list(first_rows.values()), bits_RW)
            for row, first in copies:
                bits_RW[row] = bits_RW[first]
        return bits_RW

    def _compute(self, walks: Sequence[Walk], rows: Sequence[int], bits_RW: Bits) -> None:
        """Compute these rows of `bits_RW` with llguidance, and cache the masks of shared prefixes."""
        start, step = bits_RW.ctypes.data, self.words * 4
        if self._size >= MANY_TOKENS and len(rows) >= MANY_ROWS:
            places = [(walks[row].matcher, row) for row in rows]
            self._executor.unsafe_compute_mask_ptr(places, start, step, len(walks))
        else:
            for row in rows:
                walks[row].matcher.unsafe_compute_mask_ptr(start + row * step, step)
        for row in rows:
            bits_W = bits_RW[row]
            bits_W &= self._read[1]
            if not bits_W.any():
                bits_W[:] = self._only_ends
            here = walks[row].beginning
            if here is not None:
                here.bits_W = bits_W.copy()
                self._shared += 1
        if self._shared > SHARED:
            self._beginnings.clear()
            self._shared = 0

    def ending(self, walk: Walk) -> tuple[int, ...]:
        """Return the only possible continuation of a walk, including the end of turn, or () if several continuations are possible.

        Only choices are examined. The tokens of such a continuation need no forward pass, because each has probability
        1.
        """
        if walk.beginning is None:
            return ()
        chain: list[tuple[_Beginning, int]] = []
        at = Walk(walk.matcher, here := walk.beginning)
        while at.beginning is not None and at.beginning.ending is None:
            places = self._places(at)
            if len(places) > 1:
                at.beginning.ending = ()
                break
            (token,) = places.tolist()
            chain.append((at.beginning, token))
            if token in self._ends:
                break
            at.take(token)
        rest = () if at.beginning is None else at.beginning.ending or ()
        for before, token in reversed(chain):
            rest = before.ending = (token, *rest) if rest or token in self._ends else ()
        return here.ending or ()

    @cached_property
    def _only_ends(self) -> Bits:
        bits = np.zeros(self.words * 32, dtype=np.uint8)
        bits[self._ends] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def fits(self, constraint: Constraint, most: int, *, briefly: bool = False) -> bool | None:
        """Return whether a completion can have at most `most` tokens, including its end, or None if the search is inconclusive.

        The method first writes a single text that closes quotes and brackets where possible and writes fixed text in
        long tokens. The method then searches with a few texts at a time and prefers texts with few continuations. The
        search is conclusive if it has excluded no text. With `briefly`, the search ends when the first text is
        excluded.
        """
        found = self._fits.get((constraint, most), ...)
        if found is ...:
            if len(self._fits) >= COMPILED:
                self._fits.clear()
            found = self._fits[constraint, most] = self._search(constraint, most, briefly=briefly)
        return found

    def _search(self, constraint: Constraint, most: int, *, briefly: bool) -> bool | None:
        words = {self._read[0].decode_bytes([token]): token for token in range(self._size)}
        closing = [words[mark] for mark in (b"}", b"]", b'"', b",", b":") if mark in words]
        walk = self.begin(constraint)
        for _ in range(min(most, FAR)):
            if walk.complete:
                return True
            places = self._places(walk)
            first = next((token for token in closing if token in places), None)
            walk.take(int(places[self._lengths[places].argmax()]) if first is None else first)

        # Texts by their number of tokens. Of several tokenisations of a text, and of texts that differ only in optional
        # spaces and have the same continuations, only the first is kept.
        walk, excluded = self.begin(constraint), False
        walks, seen = [(0, b"", walk, self._places(walk))], set[tuple[bytes, int]]()
        for _ in range(min(most, NEAR)):
            if any(walk.complete for _, _, walk, _ in walks):
                return True
            found: list[tuple[int, bytes, Walk, npt.NDArray[np.intp]]] = []
            for _, text, walk, places in walks:
                tried = places
                if len(tried) > 2 * TRIED:
                    count = FEW[1] if excluded else TRIED
                    ends = (*range(count), *range(-count, 0))
                    tried, excluded = tried[np.argpartition(self._lengths[tried], ends)[[*ends]]], True
                for token in tried.tolist():
                    longer = text + (self._read[0].decode_bytes([token]) or b"\xff%d" % token)
                    after = Walk(walk.matcher.deep_copy())
                    if token in self._ends or not after.matcher.consume_token(token):
                        continue
                    next_places = self._places(after)
                    key = longer.replace(b" ", b""), hash(next_places.tobytes())
                    if key in seen:
                        continue
                    seen.add(key)
                    found.append((len(next_places) - int(self._lengths[token]), longer, after, next_places))
            excluded = excluded or len(found) > WIDTH
            if excluded and briefly:
                return None
            walks = sorted(found, key=lambda each: each[0])[: FEW[0] if excluded else WIDTH]
        return None if excluded or most > NEAR else False

    def _places(self, walk: Walk) -> npt.NDArray[np.intp]:
        bits_W = self.next([walk])[0]
        return np.nonzero(np.unpackbits(bits_W.view(np.uint8), bitorder="little"))[0]

    @cached_property
    def _lengths(self) -> npt.NDArray[np.intp]:
        return np.array([len(self._read[0].decode_bytes([token])) for token in range(self._size)])

    def of(self, constraint: Constraint, ids: tuple[int, ...]) -> Bits:
        """Return the masks of the tokens that were allowed at each position of a completion, of shape (T, W)."""
        key = constraint, ids
        found = self._kept.get(key)
        if found is None:
            walk = self.begin(constraint)
            found = np.empty((len(ids), self.words), dtype=np.int32)
            for place, token in enumerate(ids):
                found[place] = self.next([walk])[0]
                walk.take(token)
            self._kept[key] = found
            self._kept_bytes += found.nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(key)
        return found
