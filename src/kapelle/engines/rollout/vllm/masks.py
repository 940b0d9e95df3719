"""A backend for vLLM's structured output that uses kapelle's own masks, so that training applies the same masks.

For each constrained request, vLLM compiles a grammar, computes a mask at each step, and sets the logits of excluded
tokens to −∞ before its sampler applies temperature, top-k and top-p. The backends of vLLM interpret a tokeniser
differently from kapelle. For example, `guidance`, which also uses llguidance, never allows a token such as
`<tool_call>` as text and supports only one end-of-turn token. This module therefore provides the grammars. vLLM passes
its structured output manager to the scheduler class that an engine argument names. The function `scheduler` installs
`MaskBackend` and then creates vLLM's own scheduler. This method works in this process, in a server, and with several
workers.

This module does not import vLLM.

In tensor shapes, W = ⌈V / 32⌉ is the number of words of 32 tokens each (see `models.token_masks`).
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
"""The value of vLLM's engine argument `scheduler_cls`."""


def scheduler(*, vllm_config: Any, structured_output_manager: Any, **given: Any) -> Any:
    """Return vLLM's own scheduler for a configuration, with kapelle's masks installed in the structured output manager."""
    vocabulary = vllm_config.model_config.get_vocab_size()
    structured_output_manager.backend = MaskBackend(structured_output_manager, vocabulary)
    # With asynchronous compilation the time at which rows join would vary, and runs would not be repeatable.
    structured_output_manager._use_async_grammar_compilation = False  # noqa: SLF001 - vLLM has no argument for it
    own = copy(vllm_config.scheduler_config)
    own.scheduler_cls = None
    made = own.get_scheduler_cls()
    return made(vllm_config=vllm_config, structured_output_manager=structured_output_manager, **given)


class MaskBackend:
    """A backend for vLLM's structured output that uses kapelle's masks (implements vLLM's `StructuredOutputBackend`)."""

    def __init__(self, manager: Any, size: int) -> None:
        """Create a backend for the tokeniser of vLLM's structured output manager and for logits of `size` tokens."""
        self._manager, self._size = manager, size
        self._masks: dict[frozenset[int], TokenMasks] = {}

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> MaskGrammar:
        """Return the grammar of a request (see `runtime.constraints.lark_of`) for a turn that ends with one of these tokens."""
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
        """Return a tensor of shape (rows, W) for the masks of `max_num_seqs` rows."""
        return torch.full((max_num_seqs, -(-self._size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing, because the backend holds no resources."""


class MaskGrammar:
    """The state of one request in its grammar (implements vLLM's `StructuredOutputGrammar`)."""

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
        """Write the mask of the allowed next tokens into one row of `bitmask`, which has shape (rows, W)."""
        bitmask[batch_index] = torch.from_numpy(self._masks.next([self._walk])[0])

    def is_terminated(self) -> bool:
        """Return whether the turn has ended."""
        return bool(self._ids) and self._ids[-1] in self._ends

    def validate_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest allowed prefix of these tokens, which are draft tokens of speculative decoding."""
        walk, allowed = self._masks.begin(self._constraint, self._ids), list[int]()
        for token in tokens:
            word = int(self._masks.next([walk])[0][token // 32])
            if not word >> token % 32 & 1 or (allowed and allowed[-1] in self._ends):
                break
            walk.take(token)
            allowed.append(token)
        return allowed

    def rollback(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens."""
        del self._ids[len(self._ids) - num_tokens :]
        self._walk = self._masks.begin(self._constraint, self._ids)

    def reset(self) -> None:
        """Remove all tokens of the request."""
        self.rollback(len(self._ids))
