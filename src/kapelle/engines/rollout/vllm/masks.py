"""A backend of vLLM's structured output with kapelle's own masks, so that training applies the same masks.

vLLM compiles a grammar for each constrained request, computes a mask at each step, and sets the logits of excluded tokens
to −∞ before its sampler tempers, cuts and draws. Its own backends interpret a tokeniser differently: `guidance`, which also
uses llguidance, never allows a token such as `<tool_call>` as text and has a single end-of-turn token. The grammars
therefore come from this module. vLLM passes its structured output to the scheduler class that an engine argument names;
`scheduler` installs `MaskBackend` before it creates vLLM's own scheduler. This works in this process, in a server, and with
several workers.

Nothing here imports vLLM.

Shapes: W = ⌈V / 32⌉ words of 32 tokens each (`models.token_masks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from kapelle.errors import EngineError
from kapelle.models.token_masks import TokenMasks
from kapelle.runtime.constraints import HEADER
from kapelle.types import Constraint

SCHEDULER = "kapelle.engines.rollout.vllm.masks.scheduler"
"""The engine argument `scheduler_cls`."""


def scheduler(*, vllm_config: Any, structured_output_manager: Any, **given: Any) -> Any:
    """Return vLLM's own scheduler for a configuration, with kapelle's masks in its structured output."""
    vocabulary = vllm_config.model_config.get_vocab_size()
    structured_output_manager.backend = MaskBackend(structured_output_manager, vocabulary)
    # With asynchronous compilation the time at which rows join would vary, and runs would not be repeatable.
    structured_output_manager._use_async_grammar_compilation = False  # noqa: SLF001 - vLLM has no argument for it
    own = copy(vllm_config.scheduler_config)
    own.scheduler_cls = None
    made = own.get_scheduler_cls()
    return made(vllm_config=vllm_config, structured_output_manager=structured_output_manager, **given)


class MaskBackend:
    """A backend of vLLM's structured output (its `StructuredOutputBackend`)."""

    def __init__(self, manager: Any, size: int) -> None:
        """Read the tokeniser of vLLM's `manager` of structured output, for logits of `size` tokens."""
        self._manager, self._size = manager, size
        self._masks: dict[frozenset[int], TokenMasks] = {}

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> MaskGrammar:
        """Return a request's grammar, one of `runtime.constraints.lark_of`, for a turn with these end tokens."""
        if request_type.name != "GRAMMAR" or not grammar_spec.startswith(HEADER):
            raise EngineError(
                "kapelle's masks support only the form of `structured_outputs.grammar` that kapelle sends. For other "
                f"forms, use a server without `--scheduler-cls {SCHEDULER}`."
            )
        ends = frozenset(stop_token_ids or ())
        if ends not in self._masks:
            self._masks[ends] = TokenMasks(self._manager.tokenizer, self._size, ends)
        text = grammar_spec.removeprefix(HEADER).strip("\n")
        return MaskGrammar(self._masks[ends], Constraint.grammar(text), ends)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        """Return memory for the masks of this many rows, `(rows, W)`."""
        return torch.full((max_num_seqs, -(-self._size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing."""


class MaskGrammar:
    """The state of one request in its grammar (vLLM's `StructuredOutputGrammar`)."""

    def __init__(self, masks: TokenMasks, constraint: Constraint, ends: frozenset[int]) -> None:
        self._masks, self._constraint, self._ends = masks, constraint, ends
        self._ids: list[int] = []
        self._walk = masks.begin(constraint)

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Append tokens that the masks have allowed."""
        del request_id
        for token in tokens:
            self._walk.take(token)
            self._ids.append(token)
        return True

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        """Write the allowed next tokens into a row of `bitmask`, `(rows, W)`."""
        bitmask[batch_index] = torch.from_numpy(self._masks.next([self._walk])[0])

    def is_terminated(self) -> bool:
        """Return whether the turn has ended."""
        return bool(self._ids) and self._ids[-1] in self._ends

    def validate_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest allowed prefix of these tokens, which are drafts of speculative decoding."""
        walk, allowed = self._masks.begin(self._constraint, self._ids), list[int]()
        for token in tokens:
            word = int(self._masks.next([walk])[0][token // 32])
            if not word >> token % 32 & 1 or (allowed and allowed[-1] in self._ends):
                break
            walk.take(token)
            allowed.append(token)
        return allowed

    def rollback(self, num_tokens: int) -> None:
        """Remove the last tokens."""
        del self._ids[len(self._ids) - num_tokens :]
        self._walk = self._masks.begin(self._constraint, self._ids)

    def reset(self) -> None:
        """Remove all tokens."""
        self.rollback(len(self._ids))
