"""What CUDA's autocast computes in float32 although its input is half precision, simulated on a CPU.

The two lists differ: on CUDA a softmax, a norm, a sum of halves is float32, on a CPU it stays half. A product in place does not
go through autocast on either, and refuses operands of two types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    LORA,
    draw_samples,
    lora_policies,
    stir,
    tiny_model,
    train_engine,
    with_columns,
)
from torch import Tensor

from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.train.protocol import Objective
from kapelle.models.fast import fused
from kapelle.rows import Sample
from kapelle.team import Critic
from kapelle.types import Sampling

IN_FLOAT32 = [
    "softmax.int",
    "log_softmax.int",
    "sum",
    "sum.dim_IntList",
    "cumsum",
    "linalg_vector_norm",
    "logsumexp",
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "reciprocal",
    "rsqrt",
    "softplus",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "layer_norm",
    "rms_norm",
    "cosine_similarity",
]
"""Of `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` (ATen/autocast_mode.h), whatever a language model could use."""

# torch tells that it has no fused norm for mixed types; the plain one is what runs.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")


@pytest.fixture(autouse=True)
def as_on_cuda() -> Iterator[None]:
    """Add CUDA's float32 operations to the CPU's autocast."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in IN_FLOAT32:
            library.impl(name, _in_float32(name), "AutocastCPU")
        yield


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("dtype") is not None  # the caller's own type is left as it is
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operation(*(args if asked else map(_widened, args)), **kwargs)

    return run


def _widened(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def test_the_simulation_does_what_cuda_does() -> None:
    half = torch.ones(2, 3, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        weight = torch.softmax(half, -1)
        assert weight.dtype == half.float().sum().dtype == half.log_softmax(-1).dtype == torch.float32
        assert torch.bmm(weight, half).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            torch.bmm(weight, half).baddbmm_(weight, half)
    assert torch.softmax(half, -1).dtype == torch.bfloat16


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["fused", "flat", "padded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sampler_and_trainer_run_and_agree(dtype: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "fused":
        monkeypatch.setattr(fused, "LARGEST", 0)  # as for a model above 67 M weights
    model = tiny_model(dtype=dtype)
    model.flat = None if way == "padded" else model.flat
    engine = train_engine(lora_policies("a", "b"), [Critic("v", lora=LORA)], models={"base": model})
    for seed, name in enumerate(("a", "b")):
        stir(model.bank.parameters(name), seed)
    # Several blocks of the cache, for rows with prompts of their own and for rows that share them.
    prompts = [tuple(range(7, 7 + length)) for length in (5, 9, 9, 12)]
    jobs = [Job(name, prompt, Sampling(max_tokens=40), 3) for name in ("a", "b") for prompt in prompts]
    samples = []
    for job, said in zip(jobs * 2, decode(model, jobs) + decode(model, jobs * 3)[: len(jobs)], strict=True):
        tokens, start = (*job.prompt, *said.ids), len(job.prompt)
        columns = {"behaviour": torch.tensor(said.logprobs), "advantage": torch.ones(len(said.ids))}
        samples.append(Sample(str(job.adapter), tokens, tuple(range(start, len(tokens))), columns))
    values = with_columns(
        draw_samples(["v"], [(3, 5)]), **{"return": [torch.ones(5)], "value": [torch.zeros(5)]}
    )
    objective = Objective(SurrogateConfig().build(), ValueLossConfig().build(), 0.5)
    found = engine.update([*samples, *values], objective)  # ParityError beyond the type's bound
    assert found["parity/max"] > 0
