"""The base class of connections to vLLM, and vLLM's LLM engine in this process. Only this module imports vLLM.

When vLLM starts, it changes the state of its process: it seeds the global random generators, replaces
`torch.set_num_threads`, and sets the number of threads. This module restores the random generators and the functions
and threads of torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kapelle.engines.rollout.vllm import KV_GIB
from kapelle.engines.rollout.vllm.masks import SCHEDULER
from kapelle.errors import EngineError
from kapelle.runtime.constraints import lark_of
from kapelle.runtime.randomness import capture_random, restore_random
from kapelle.types import Json, Sampling

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM allows for `max_lora_rank`."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # sample in this process, so that timing is repeatable
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same threads
}
"""Environment variables that vLLM reads on import. Variables that are already set keep their values."""

WORKER = "kapelle.engines.rollout.vllm.worker.TakesWeights"
"""The base class that is added to vLLM's worker class."""

SMALLEST_HEAD = 32
"""The smallest size of attention heads that vLLM supports on a CPU. With smaller heads, vLLM fails at the first row."""

OF_FREE = 0.9
"""The fraction of the free memory of a GPU that all vLLM models together may use, including weights and KV cache."""


def changes_of(sampling: Sampling) -> dict[str, Any]:
    """Return the adjustments of logits that a caller requested, as sampling parameters of vLLM."""
    change = sampling.adjusted
    return {} if change is None else {**asdict(change), "logit_bias": dict(change.logit_bias)}


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A published adapter, which has a unique name and number."""

    name: str
    number: int
    """The number by which vLLM identifies the adapter, starting at 1."""
    folder: Path
    """The folder that contains the adapter in PEFT's format."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt for which vLLM samples a completion."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    adapter: AdapterFile | None
    followed: bool = False
    """Whether `abort` returns the tokens sampled so far. Following a row costs time at every token."""


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A row that is finished, with its tokens or an error."""

    id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-prob of each token id under the sampling distribution, in nats."""
    stopped: bool
    """Whether the row ended with an end-of-turn token or a stop string. The value is False if the row reached a limit."""
    error: str | None = None
    """The reason why there is no completion, or None. Other rows are not affected by the error."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The properties of a base model that vLLM needs."""

    path: str
    """A folder in the format of `transformers`, or the name of a model on the Hugging Face Hub."""
    dtype: str
    context: int
    """The maximum number of tokens of a prompt and its completion together."""
    ends: tuple[int, ...]
    """The token ids that end a turn."""
    adapters: int
    """The maximum number of adapters in one batch, or 0 if there are no adapters."""
    rank: int
    """The largest rank of the adapters."""
    share: float = 1.0
    """The fraction of the device's free memory that the model may use. The rest of the memory is left for models that
    start later."""
    trained_on: tuple[int, ...] = ()
    """The indices of the GPUs that the trainer's models use."""
    kept_free: int = 0
    """The number of bytes on a device that the trainer will need later, for gradients and optimiser moments."""
    head_size: int = SMALLEST_HEAD
    """The size of the model's attention heads."""


class VllmModel:
    """A base model that runs in vLLM."""

    def add(self, row: Row) -> None:
        """Add a row to the batch. If an error is raised, only this row fails."""
        raise NotImplementedError

    def step(self) -> Sequence[FinishedRow]:
        """Sample a token for each row and return the finished rows. After an error, the sampler is unusable."""
        raise NotImplementedError

    def abort(self, rows: Sequence[str]) -> Mapping[str, FinishedRow]:
        """Drop the rows with these ids, and return those that are followed, by id, with their tokens so far."""
        raise NotImplementedError

    def forget_prefixes(self) -> None:
        """Empty the KV cache. This method is called while no row is being decoded."""
        raise NotImplementedError

    def drop_adapter(self, adapter: AdapterFile) -> None:
        """Drop an adapter that rows no longer need."""
        raise NotImplementedError

    def take(self, weights: Mapping[str, Tensor], write: Callable[[], Path]) -> bool:
        """Load new weights of the base model by name. If the sampler needs a file, `write` writes the weights to a folder.

        No row is being decoded during this call. Returns False if the method is not supported, in which case vLLM must
        be restarted. After an error, the sampler is unusable.
        """
        return False

    def sleep(self) -> None:
        """Free the memory of a GPU until the next row is added."""

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError


Start = Callable[[BaseModel], VllmModel]
"""A function that starts vLLM on a base model."""


def start_in_process(
    kv_gib: float | None, max_rows: int, options: Mapping[str, Json], about: BaseModel
) -> VllmModel:
    """Start vLLM on a base model in this process. Raises EngineError with vLLM's own reason if vLLM does not start."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    given = arguments(kv_gib, max_rows, options, about)
    # Keep the state of the random generators and torch's threads.
    drawn, threads, setter = capture_random(), torch.get_num_threads(), torch.set_num_threads
    try:
        return InProcess(given, about)
    except Exception as error:
        raise EngineError(
            f"vLLM did not start on '{about.path}': {error}. Set further arguments of vLLM in `engine.options`."
        ) from error
    finally:
        torch.set_num_threads = setter
        torch.set_num_threads(threads)
        restore_random(drawn)


def arguments(
    kv_gib: float | None, max_rows: int, options: Mapping[str, Json], about: BaseModel
) -> dict[str, Any]:
    """Return vLLM's engine arguments for a base model. Without `kv_gib`, the KV cache uses the free memory of a GPU.

    Raises EngineError if vLLM does not support the model or its adapters on this device.
    """
    if about.head_size < SMALLEST_HEAD and not torch.cuda.is_available():
        raise EngineError(
            f"The model '{about.path}' has attention heads of size {about.head_size}, but vLLM on a CPU needs {SMALLEST_HEAD} or more. Sample without "
            "`engine`, or give the model fewer heads: `model.embedded: {hidden: 64, heads: 2, kv_heads: 1}`."
        )
    room: dict[str, Any] = {"kv_cache_memory_bytes": int((kv_gib or KV_GIB) * 2**30)}
    if kv_gib is None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        room = {"gpu_memory_utilization": max(OF_FREE * about.share * free - about.kept_free, 0.0) / total}
    lora: dict[str, Any] = {}
    if about.adapters:
        if about.rank > RANKS[-1]:
            raise EngineError(
                f"vLLM supports adapters up to rank {RANKS[-1]}, but the rank is {about.rank}. Lower `team.lora.rank`."
            )
        lora = {
            "enable_lora": True,
            "max_loras": about.adapters,
            "max_cpu_loras": 2 * about.adapters,  # old and new ones during a publish
            "max_lora_rank": next(rank for rank in RANKS if rank >= about.rank),
        }
    return {
        "model": about.path,
        "dtype": about.dtype,
        "max_model_len": about.context,
        "max_num_seqs": max_rows,
        **room,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # requests set all sampling parameters
        "enforce_eager": not torch.cuda.is_available(),
        # The memory of a GPU that also trains is freed during updates; vLLM uses the first GPUs.
        "enable_sleep_mode": any(
            k < int(str(options.get("tensor_parallel_size", 1))) for k in about.trained_on
        ),
        "worker_extension_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "structured_outputs_config": {"backend": "guidance"},  # the format of grammars
        "disable_log_stats": True,
        "seed": 0,
        **lora,
        **options,
    }


PARTS = ("kv_cache", "weights")
"""The parts of vLLM's memory that can be put to sleep and woken separately."""


class InProcess(VllmModel):
    """A base model that runs in vLLM's LLM engine in this process."""

    def __init__(self, given: Mapping[str, Any], about: BaseModel) -> None:
        if not torch.cuda.is_available():
            import torch._dynamo as dynamo

            # Compilation for a CPU takes more than a minute but saves only milliseconds.
            dynamo.config.disable = True
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]

        self._ends = list(about.ends)
        self._asleep: set[str] = set()
        """The parts of vLLM's memory that are asleep (the KV cache, the weights, or both)."""
        self._sleeps = bool(given["enable_sleep_mode"])
        self._followed: dict[str, FinishedRow] = {}
        """The tokens so far of the rows that are followed."""
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**given))

    def add(self, row: Row) -> None:
        """Add a row to the batch."""
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
        from vllm.sampling_params import (  # type: ignore[import-not-found]
            RequestOutputKind,
            StructuredOutputsParams,
        )

        if self._asleep:
            self._wake(self._asleep)
            self._engine.reset_prefix_cache()
        sampling = row.sampling
        form = sampling.constraint and StructuredOutputsParams(grammar=lark_of(sampling.constraint))
        params = SamplingParams(
            **changes_of(sampling),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=row.seed,
            stop=list(sampling.stop),
            stop_token_ids=self._ends,
            ignore_eos=True,  # the end tokens above apply to every model
            logprobs=0,
            detokenize=bool(sampling.stop),
            structured_outputs=form,
            output_kind=RequestOutputKind.DELTA if row.followed else RequestOutputKind.FINAL_ONLY,
        )
        adapter = row.adapter
        request = None if adapter is None else LoRARequest(adapter.name, adapter.number, str(adapter.folder))
        prompt = {"prompt_token_ids": list(row.prompt)}
        if row.followed:
            self._followed[row.id] = FinishedRow(row.id, (), (), stopped=False)
        self._engine.add_request(row.id, prompt, params, lora_request=request)

    def step(self) -> Sequence[FinishedRow]:
        """Sample a token for each row and return the rows that have finished."""
        finished = []
        for output in self._engine.step():
            if not output.finished and output.request_id not in self._followed:
                continue
            (completion,) = output.outputs
            if not output.finished:
                self._followed[output.request_id] = _with_tokens(
                    self._followed[output.request_id], completion
                )
                continue
            row = self._followed.pop(output.request_id, FinishedRow(output.request_id, (), (), stopped=False))
            if completion.finish_reason not in ("stop", "length"):
                reason = f"vLLM ended a request without a completion ({completion.finish_reason})."
                finished.append(FinishedRow(row.id, (), (), stopped=False, error=reason))
                continue
            finished.append(
                replace(_with_tokens(row, completion), stopped=completion.finish_reason == "stop")
            )
        return finished

    def abort(self, rows: Sequence[str]) -> Mapping[str, FinishedRow]:
        """Drop the rows with these ids, and return those that are followed."""
        self._engine.abort_request(list(rows))
        return {row: self._followed.pop(row) for row in rows if row in self._followed}

    def forget_prefixes(self) -> None:
        """Empty the KV cache."""
        if not self._asleep:
            self._engine.reset_prefix_cache()

    def drop_adapter(self, adapter: AdapterFile) -> None:
        """Drop an adapter if a row has used the adapter."""
        if adapter.number in self._engine.list_loras():
            self._engine.remove_lora(adapter.number)

    def take(self, weights: Mapping[str, Tensor], write: Callable[[], Path]) -> bool:
        """Copy new weights of the base model into vLLM's memory on the same device. The KV cache stays asleep."""
        self._wake(self._asleep & {"weights"})
        # If there are several workers, they are separate processes, which read the file.
        alone = self._engine.vllm_config.parallel_config.world_size == 1
        given = (None, dict(weights)) if alone else (str(write()),)
        self._engine.collective_rpc("take_weights", args=given)
        self.forget_prefixes()
        return True

    def sleep(self) -> None:
        """Free the memory of a GPU by moving the weights to the host and dropping the KV cache."""
        if not self._sleeps or len(self._asleep) == len(PARTS):
            return
        self._wake(self._asleep)
        self._engine.sleep(level=1)
        self._asleep = set(PARTS)

    def _wake(self, parts: set[str]) -> None:
        if parts:
            self._engine.wake_up(tags=sorted(parts))
            self._asleep = self._asleep - parts

    def close(self) -> None:
        """Shut down the LLM engine."""
        self._engine.engine_core.shutdown()


def _with_tokens(row: FinishedRow, completion: Any) -> FinishedRow:
    """Return a row with the further tokens of vLLM's output."""
    ids = tuple(completion.token_ids)
    if completion.logprobs is None or len(completion.logprobs) != len(ids):
        raise EngineError("vLLM returned tokens without their log-probs.")
    found = zip(completion.logprobs, ids, strict=True)
    logprobs = tuple(float(by_token[token].logprob) for by_token, token in found)
    return replace(row, ids=(*row.ids, *ids), logprobs=(*row.logprobs, *logprobs))
