"""How servers want to be asked: vLLM's OpenAI-compatible completions, and SGLang's own `/generate`.

Both take token ids and return the sampled ids with their log-probs. SGLang's log-probs are those of the tempered distribution before
top-k and top-p, so such rows are refused there. SGLang was never run: what is written here follows its documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from kapelle.engines.rollout.vllm.sampler import BaseModel, Row, Sampled
from kapelle.types import Json


class Dialect(NamedTuple):
    """The paths of a server and the form of its requests and answers."""

    name: str
    complete: str
    load: str
    """Takes `lora_name` and `lora_path`."""
    unload: str
    """Takes `lora_name`."""
    forget: str
    """Empties the prefix cache."""
    ask: Callable[[Row, str, BaseModel], Json]
    """Row, name of the base model, base model → body of the request; ValueError with the reason for a row that cannot be asked."""
    read: Callable[[str, int, bytes], Sampled]
    """Row id, HTTP status, body → ids and log-probs, or why there are none."""


def _ask_vllm(row: Row, base: str, about: BaseModel) -> Json:
    asked = row.sampling
    return {
        "model": base if row.adapter is None else row.adapter.name,
        "prompt": list(row.prompt),
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "seed": row.seed,
        "stop": list(asked.stop),
        "stop_token_ids": list(about.ends),
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _read_vllm(row: str, status: int, answer: bytes) -> Sampled:
    def parts(found: Any) -> tuple[Any, Any, Any]:
        choice = found["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]

    return _read("vLLM", "`return_token_ids`, `logprobs`", parts, row, status, answer)


def _ask_sglang(row: Row, _base: str, about: BaseModel) -> Json:
    asked = row.sampling
    if asked.top_p < 1 or asked.top_k > 0:
        raise ValueError(
            "SGLang returns log-probs of the distribution before top-k and top-p. Set `top_p: 1` and `top_k: 0`."
        )
    return {
        "input_ids": list(row.prompt),
        "sampling_params": {
            "max_new_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "sampling_seed": row.seed,
            "stop": list(asked.stop),
            "stop_token_ids": list(about.ends),  # ignored with `ignore_eos`
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "lora_path": None if row.adapter is None else row.adapter.name,
    }


def _read_sglang(row: str, status: int, answer: bytes) -> Sampled:
    def parts(found: Any) -> tuple[Any, Any, Any]:
        about = found["meta_info"]
        tokens = about["output_token_logprobs"]
        return [token[1] for token in tokens], [token[0] for token in tokens], about["finish_reason"]["type"]

    return _read("SGLang", "`output_token_logprobs`", parts, row, status, answer)


def _read(
    name: str,
    fields: str,
    parts: Callable[[Any], tuple[Any, Any, Any]],
    row: str,
    status: int,
    answer: bytes,
) -> Sampled:
    """Return a server's answer as a row: token ids and their log-probs, or why there are none."""
    if status != 200:
        said = answer[:300].decode("utf-8", "replace")
        return Sampled(row, (), (), stopped=False, error=f"The {name} server answered HTTP {status}: {said}")
    try:
        tokens, logps, finish = parts(json.loads(answer))
        ids = tuple(int(token) for token in tokens)
        logprobs = tuple(float(logp) for logp in logps)
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        ids, logprobs, finish = (), (), None
    if finish not in ("stop", "length") or len(ids) != len(logprobs):
        reason = f"The {name} server answered without token ids and their log-probs ({fields})."
        return Sampled(row, (), (), stopped=False, error=reason)
    return Sampled(row, ids, logprobs, finish == "stop")


VLLM = Dialect(
    "vLLM",
    "/v1/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    _ask_vllm,
    _read_vllm,
)
SGLANG = Dialect(
    "SGLang",
    "/generate",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/flush_cache",
    _ask_sglang,
    _read_sglang,
)
SGLANG_KNOWS = "/get_model_info"
"""A path that SGLang answers with `model_path`, and vLLM does not."""
