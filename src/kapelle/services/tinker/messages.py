"""Converts between the binary messages of the protocol and examples and results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor

from kapelle.errors import did_you_mean
from kapelle.runtime.wire import tinker_v1_pb2 as wire
from kapelle.services.request_errors import wrong
from kapelle.services.tinker.passes import LOSSES, Example, Scored

DTYPES = {wire.FLOAT32: "<f4", wire.INT64: "<i8", wire.INT32: "<i4"}


def read_passes(body: bytes) -> wire.ForwardBackwardRequest:
    """Parse the body of a call of `forward_backward`. Raises RequestError (400) if it is malformed."""
    request = wire.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise wrong("The body is not a message of the Tinker protocol.") from None
    if request.loss_fn not in LOSSES:
        raise wrong(f"Unknown loss.{did_you_mean(request.loss_fn[:64], list(LOSSES))}", "loss_fn")
    if not request.data:
        raise wrong("`data` is empty. Send at least one example.", "data")
    return request


def examples_of(
    request: wire.ForwardBackwardRequest, adapter: str, vocabulary: int, context: int
) -> list[Example]:
    """Return the examples of a call for an adapter. Raises RequestError (400), which names the first incorrect example."""
    _, required, settings = LOSSES[request.loss_fn]
    config = {name: each.number for name, each in request.loss_fn_config_v2.items()} or dict(
        request.loss_fn_config
    )
    for name in config:
        if name not in settings:
            raise wrong(
                f"The loss `{request.loss_fn}` has no setting of that name.{did_you_mean(name[:64], settings)}",
                "loss_fn_config",
            )
    examples = []
    for number, datum in enumerate(request.data):
        at = f"data[{number}]"
        if any(chunk.WhichOneof("kind") is None for chunk in datum.model_input):
            raise wrong(f"`{at}.model_input` has a chunk that is not text. Send only token ids.", "data")
        tokens = [
            token
            for chunk in datum.model_input
            for token in _array(chunk.encoded_text.tokens, "<i4", at).tolist()
        ]
        check_tokens(tokens, vocabulary, context, f"{at}.model_input")
        columns = {
            name: _column(each, f"{at}.loss_fn_inputs.{name}", len(tokens))
            for name, each in datum.loss_fn_inputs.items()
        }
        missing = next((name for name in ("target_tokens", *required) if name not in columns), None)
        if missing is not None:
            raise wrong(f"`{at}.loss_fn_inputs` lacks `{missing}`, which `{request.loss_fn}` needs.", "data")
        odd = next((name for name in columns if name not in ("target_tokens", "weights", *required)), None)
        if odd is not None:
            raise wrong(f"`{at}.loss_fn_inputs.{odd[:64]}` is not an input of `{request.loss_fn}`.", "data")
        targets_NK = columns.pop("target_tokens").long()
        if targets_NK.numel() and not 0 <= int(targets_NK.min()) <= int(targets_NK.max()) < vocabulary:
            raise wrong(f"`{at}.loss_fn_inputs.target_tokens` has ids outside 0 to {vocabulary - 1}.", "data")
        for name, column in columns.items():
            if column.shape != targets_NK.shape:
                raise wrong(f"`{at}.loss_fn_inputs.{name}` needs the shape of `target_tokens`.", "data")
            if not bool(column.isfinite().all()):
                raise wrong(f"`{at}.loss_fn_inputs.{name}` has a value that is not finite.", "data")
        floats = {name: column.float() for name, column in columns.items()}
        examples.append(
            Example(
                adapter,
                tuple(tokens),
                targets_NK,
                request.loss_fn,
                floats,
                config,
                backward=not request.forward_only,
            )
        )
    return examples


def check_tokens(tokens: Sequence[int], vocabulary: int, context: int, where: str) -> None:
    """Raise RequestError (400) unless a sequence has tokens, only ids of the vocabulary, and fits in the context."""
    if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
        raise wrong(f"`{where}` needs at least one token, with ids from 0 to {vocabulary - 1}.", where)
    if len(tokens) > context:
        raise wrong(f"`{where}` has {len(tokens)} tokens, but the context is {context} tokens.", where)


def _array(content: bytes, dtype: str, where: str) -> NDArray[np.generic]:
    if len(content) % np.dtype(dtype).itemsize:
        raise wrong(f"`{where}` has an incomplete array.", "data")
    return np.frombuffer(content, dtype)


def _column(tensor: wire.Tensor, where: str, length: int) -> Tensor:
    """Return an input of a loss as a tensor of shape (N, K)."""
    if tensor.dtype not in DTYPES:
        raise wrong(f"`{where}` is neither float32 nor integer.", "data")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        parts = (
            _array(csr.crow_indices, "<i8", where),
            _array(csr.col_indices, "<i8", where),
            _array(csr.values, dtype, where),
        )
        try:
            rows, columns, values = (torch.from_numpy(each.copy()) for each in parts)
            sparse = torch.sparse_csr_tensor(rows, columns, values, size=shape, check_invariants=True)
        except (RuntimeError, ValueError, TypeError):
            raise wrong(f"`{where}` is not a valid sparse matrix.", "data") from None
        if shape[0] != length or shape[1] > 1024:
            raise wrong(f"`{where}` needs {length} rows and at most 1024 columns.", "data")
        return sparse.to_dense()
    flat = torch.from_numpy(_array(tensor.dense, dtype, where).copy())
    if not flat.numel() or flat.numel() % length or (shape and int(np.prod(shape)) != flat.numel()):
        raise wrong(f"`{where}` needs one row for each of the {length} tokens of `model_input`.", "data")
    if shape and (shape[0] != length or len(shape) > 2):
        raise wrong(
            f"`{where}` has the shape {list(shape)[:4]}, but needs [{length}] or [{length}, K].", "data"
        )
    return flat.view(length, -1)


def passes_answer(scored: Sequence[Scored], shapes: Sequence[int]) -> bytes:
    """Return the answer of `forward_backward`: the log-probs of each example, and the sum of the losses.

    The list `shapes` contains the number of dimensions of each example's targets.
    """
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for each, dimensions in zip(scored, shapes, strict=True):
        # One record for each example, because records have one number of targets per position.
        content = each.logp_NK.contiguous().numpy().astype("<f4").tobytes()
        record = output.loss_fn_outputs.add(num_datums=1)
        field = record.fields["logprobs"]
        field.data, field.dtype = content, wire.FLOAT32
        field.offsets = np.array([0, len(content)], "<i8").tobytes()
        if dimensions > 1:
            field.trailing_shape.append(each.logp_NK.shape[1])
    output.metrics["loss:sum"] = sum(each.loss for each in scored)
    return bytes(output.SerializeToString())


def sampled_answer(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], bool]], prompt: Scored | None
) -> bytes:
    """Return the answer of `asample`: tokens, log-probs and whether a stop ended the sequence, for each sequence.

    If the prompt was scored, its log-probs (without the first token's) are added.
    """
    answer = wire.SampleResponse()
    for tokens, logprobs, stopped in sequences:
        answer.sequences.add(
            stop_reason=wire.STOP if stopped else wire.LENGTH,
            tokens=np.array(tokens, "<i4").tobytes(),
            logprobs=np.array(logprobs, "<f4").tobytes(),
        )
    if prompt is not None:
        logp = np.concatenate([[np.nan], prompt.logp_NK[:, 0].numpy()])
        answer.prompt_logprobs = logp.astype("<f4").tobytes()
        if prompt.top_NT is not None and prompt.top_logp_NT is not None and prompt.top_NT.shape[1]:
            top, count = answer.topk_prompt_logprobs, prompt.top_NT.shape[1]
            top.k, top.length = count, len(logp)
            # Nothing predicts the first token; the protocol marks empty cells by id 0 and log-prob −99999.
            ids = np.concatenate([np.zeros((1, count)), prompt.top_NT.numpy()])
            values = np.concatenate([np.full((1, count), -99999.0), prompt.top_logp_NT.numpy()])
            top.token_ids, top.logprobs = ids.astype("<i4").tobytes(), values.astype("<f4").tobytes()
    return bytes(answer.SerializeToString())
