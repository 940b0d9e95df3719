"""A causal language model with its decoder, output head, tokeniser, adapters and value heads; also a reward model.

Any causal LM of `transformers` is supported if its logits are a linear map of the last hidden state, with an optional
factor and soft cap. The map to logits is checked when a model is loaded. The page docs/models.md lists what is
supported for each model family.

In tensor shapes, R is the number of rows, L of positions, K of chosen positions and B of conversations; D is the hidden
size and V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from kapelle.errors import ModelError
from kapelle.models.chat_template import named_template
from kapelle.models.checksums import verify_folder
from kapelle.models.devices import configure_memory
from kapelle.models.fast.attention import AttentionPlan, plan_sequences
from kapelle.models.fast.flat import flat_of
from kapelle.models.light_tokenizer import context_of, end_tokens
from kapelle.models.lora_bank import LoraBank, Route, layers_of
from kapelle.models.paths import check_model_path, loading
from kapelle.models.pretrained import load_pretrained, located, read_config, read_tokenizer
from kapelle.models.renderer import ChatRenderer
from kapelle.models.routing import RouterChoices
from kapelle.models.token_masks import TokenMasks
from kapelle.models.vision import Vision, auto_class, need_pillow, read_image_processor
from kapelle.runtime.hub import bars_for_people
from kapelle.settings.schema import ModelConfig
from kapelle.types import Image

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECKED = 12
"""The number of tokens of the sequence with which a model is checked when it is loaded."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

HALF = (torch.bfloat16, torch.float16)

BOUND = 1e-4
"""The maximum difference between two float32 passes over the same weights, relative to the norm of the logits."""

HALF_BOUND = 0.1
"""The maximum difference between two half-precision passes over the same weights, relative to the norm of the logits."""

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
"""Settings of `transformers` that multiply or divide the logits."""
CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Settings of `transformers` that cap the logits."""

Run = Callable[..., Any]
"""A function that is called with a block and the block's arguments and returns the block's result."""


class LanguageModel:
    """A base model in memory, with its adapters and value heads."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str = "float32",
        name: str = "model",
        *,
        kernels: bool = True,
        image_processor: Any = None,
        trains_router: bool = False,
        replays_routing: bool = False,
        float_head: bool = False,
    ) -> None:
        """Wrap a model in memory. Raises ModelError for weights that kapelle would compute incorrectly.

        With `trains_router`, the routers of a mixture are trained if all weights are trained. With `replays_routing`,
        training uses the experts that sampling chose. With an image processor, a model of the Qwen-VL type reads images
        (`models/vision.py`). With `kernels`, passes on CUDA use the kernels of models/fast/kernels.py; otherwise,
        passes use torch's plain operations. With `float_head`, the output head computes in float32.
        """
        # kapelle reads weights directly, so it would miss the adapters in PEFT's layers.
        if any(type(module).__module__.startswith("peft.") for module in model.modules()):
            raise ModelError(
                f"The model '{name}' already has PEFT adapters. Pass `model.merge_and_unload()`, or pass its base and set the "
                "adapter's folder as an agent's `weights: {past: FOLDER}`."
            )
        # Weights in a half-precision type other than the compute type would mix types in every product.
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        held = kinds - {torch.float32, DTYPES[dtype]}
        if held:
            kind = str(held.pop()).removeprefix("torch.")
            raise ModelError(
                f"The model '{name}' has weights in {kind} but computes in {dtype}. Pass `dtype=\"{kind}\"` to "
                "LanguageModel, or load it in float32."
            )
        # Log-probs over a large vocabulary read the output head's weights in pieces, which quantised weights do not allow.
        head = model.get_output_embeddings()
        if head is not None and not head.weight.is_floating_point():
            raise ModelError(
                f"The output head of the model '{name}' is quantised. Exclude it from quantisation: "
                "`BitsAndBytesConfig(..., llm_int8_skip_modules=['lm_head'])`, or set `model.quantization: nf4` in a "
                "recipe."
            )
        # In some models `base_model` is the model itself.
        body = (
            model.base_model if model.base_model is not model else dict(model.named_children()).get("model")
        )
        if body is None:
            raise ModelError(
                f"{type(model).__name__} has no decoder apart from its output head. Choose a causal LM."
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.dtype = DTYPES[dtype]
        self.body: nn.Module = body
        """The decoder, which returns the last hidden states."""
        self.kernels = kernels
        self.float_head = float_head and self.dtype != torch.float32
        """Whether the output head computes in float32, although other layers compute in half precision."""
        self.bank = LoraBank(model, kernels=kernels)
        self.flat = flat_of(model, kernels=kernels)
        """The flat forward pass, or None if only `transformers` supports the architecture."""
        self.sharded_pass: Callable[..., Tensor] | None = None
        """The function that replaces `whole_pass` while this process holds a shard of the weights."""
        self.computes_on: torch.device | None = None
        """The device of forward passes if FSDP sometimes shards the weights, or None for the device of the weights."""
        self._kept_head: Tensor | None = None
        self.value_heads: dict[str, nn.Linear] = {}
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        """The number of embeddings. Valid token ids are less than this number."""
        self.vision = (
            None
            if image_processor is None
            else Vision(image_processor, model.config, cast("Any", body).get_rope_index)
        )
        """The object that prepares images, or None for a model that reads only text."""
        self.trains_router = trains_router
        """Whether the routers are trained if all weights are trained."""
        self.choices = RouterChoices(model, self.bank) if replays_routing else None
        """The choices of the routers if sampling records them for training; otherwise None."""
        generation = getattr(model, "generation_config", None)
        ends = end_tokens({} if generation is None else generation.to_dict())
        context = context_of(model.config, tokenizer)
        self.renderer = ChatRenderer(tokenizer, context, self.vocabulary, self.vision, ends=ends)
        if generation is not None and self.end_ids - ends:  # programs that load an export stop there too
            generation.eos_token_id = sorted(self.end_ids)
        self.model.requires_grad_(False)
        # "medium" makes processors with AMX multiply float32 in bfloat16, which is beyond the bounds of the checks here.
        if torch.backends.mkldnn.matmul.fp32_precision == "bf16":  # type: ignore[attr-defined]
            torch.set_float32_matmul_precision("highest")
        self._scale, self._softcap = self._checked_head()

    @property
    def device(self) -> torch.device:
        """The device on which forward passes are computed."""
        device: torch.device = self.model.device
        return self.computes_on or device

    def to(self, device: str | None) -> LanguageModel:
        """Move the weights to a device, one tensor at a time, and return the model. None keeps the current device."""
        if device is not None:
            nn.Module.to(self.model, device)
            for head in self.value_heads.values():
                head.to(device)
        return self

    @property
    def held_in_half(self) -> bool:
        """Whether the model stores any weight in a type other than float32. Such a model's weights are frozen."""
        return any(parameter.dtype != torch.float32 for parameter in self.model.parameters())

    @property
    def plain_attention(self) -> bool:
        """Whether `transformers` has no fused attention for the architecture, so that attention scores take memory."""
        settings = self.model.config
        heads = getattr(settings.get_text_config(), "num_attention_heads", None)
        return self.flat is None and bool(heads) and settings._attn_implementation == "eager"  # noqa: SLF001 - it has no public name

    @property
    def hidden_size(self) -> int:
        """The hidden size (D)."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a turn."""
        return self.renderer.end_ids

    @cached_property
    def masks(self) -> TokenMasks:
        """The object that computes which tokens constraints allow."""
        return TokenMasks(self.tokenizer, len(self.model.get_output_embeddings().weight), self.end_ids)

    @contextmanager
    def computing(
        self, route: Route, keys_N: Tensor | None = None, experts_NLk: Tensor | None = None
    ) -> Iterator[None]:
        """Run the forward passes of this context in the compute type, with rows routed to their adapters.

        The tensor `keys_N` contains dropout keys. With `experts_NLk`, tokens use these experts of a mixture
        (`models/routing.py`).
        """
        configure_memory()
        half = self.dtype != torch.float32
        with (
            self.bank.routed(route, keys_N, experts_NLk),
            torch.autocast(self.device.type, self.dtype, enabled=half),
        ):
            yield

    def hidden(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        plan: AttentionPlan,
        *,
        recompute: bool = False,
        images: Mapping[int, tuple[Image, ...]] = MappingProxyType({}),
    ) -> Tensor:
        """Return the last hidden states of flat tokens, of shape (N, D). Call this method inside the context `computing`.

        The mapping `images` contains the images of a sequence by the index of the sequence's first token. Plans with
        shared prefixes require a model with a flat pass; other models process padded sequences, one bucket after
        another. With `recompute`, the forward pass keeps only the input of each block, and the backward pass recomputes
        the block.
        """
        run = recompute_blocks(self.bank) if recompute else None
        if self.sharded_pass is not None:
            assert not images, "`check_run` rejects images with sharded weights"
            return self.sharded_pass(tokens_N, positions_N, plan, run)
        return whole_pass(self, tokens_N, positions_N, plan, run, images)

    @property
    def head(self) -> OutputHead:
        """The map from hidden states to logits, with the current weights."""
        layer = self.model.get_output_embeddings()
        return OutputHead(layer.weight, getattr(layer, "bias", None), self._scale, self._softcap)

    def logits(self, hidden_KD: Tensor) -> Tensor:
        """Return the logits of hidden states, of shape (K, V), in at least float32."""
        if not self.float_head:
            return self.head.finish(self.model.get_output_embeddings()(hidden_KD))
        with torch.autocast(self.device.type, enabled=False):
            bias_V = self.head.bias_V
            product_KV = linear(
                hidden_KD.float(), self._float_weight(), None if bias_V is None else bias_V.float()
            )
            return self.head.finish(product_KV)

    def _float_weight(self) -> Tensor:
        """Return the weight of the output head in float32. The copy of a frozen weight is kept, because it never changes."""
        weight_VD: Tensor = self.model.get_output_embeddings().weight
        if weight_VD.dtype == torch.float32 or weight_VD.requires_grad or self.sharded_pass is not None:
            return weight_VD.float()
        if self._kept_head is None:
            with torch.inference_mode(mode=False):
                self._kept_head = weight_VD.detach().float()
        return self._kept_head

    def values(self, critic: str, hidden_KD: Tensor) -> Tensor:
        """Return the values of a critic, of shape (K,), in float32."""
        head = self.value_heads[critic]
        with torch.autocast(self.device.type, enabled=False):
            values: Tensor = head(hidden_KD.to(head.weight.dtype)).squeeze(-1)
        return values

    def add_value_head(self, critic: str) -> None:
        """Add a scalar value head whose weights are zero, so that an untrained critic predicts 0."""
        head = nn.Linear(self.hidden_size, 1, device=self.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.value_heads[critic] = head

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the base model under their `transformers` names, without adapters."""
        return {
            key.replace(".base.", "."): parameter
            for key, parameter in self.model.named_parameters()
            if ".adapters." not in key
        }

    @property
    def frozen_parameters(self) -> frozenset[str]:
        """The names in `base_parameters` that stay frozen when all weights are trained: vision tower, projector and routers."""
        layers = layers_of(self.model)
        beside = tuple(f"{path}." for path in layers.eyes)
        frozen = beside if self.trains_router else (*beside, *(f"{path}." for path in layers.routers))
        return frozenset(name for name in self.base_parameters() if name.startswith(frozen))

    @torch.no_grad()
    def _checked_head(self) -> tuple[float, float | None]:
        """Return the factor and the soft cap with which the model's logits follow from the linear map of the output head.

        The method compares the logits of a few tokens with the model's own logits. Raises ModelError if the output head
        computes more than a linear map, a factor and a soft cap, or if kapelle's forward pass differs.
        """
        tokens_N = torch.arange(1, 2 * CHECKED, device=self.device) % self.vocabulary
        lengths = (CHECKED, CHECKED - 1)  # in one bucket, so that a padded pass has padding
        positions_N = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        route = [(None, 0, len(tokens_N))]
        with self.computing(route) if self.held_in_half else self.bank.routed(route):
            hidden_ND = self.hidden(tokens_N, positions_N, plan_sequences(lengths, self.device))
            linear_NV = self.model.get_output_embeddings()(hidden_ND)
            each = [
                self.model(input_ids=x_L[None], use_cache=False).logits[0] for x_L in tokens_N.split(lengths)
            ]
        settings = self.model.config.get_text_config().to_dict()
        # Half precision rounds in every layer, so its bound is wider.
        bound = HALF_BOUND if self.held_in_half else BOUND
        found = scale_and_cap(settings, linear_NV, torch.cat(each), bound)
        if found is None:
            raise ModelError(
                f"kapelle's logits differ from those of {type(self.model).__name__}: its output head does more than a "
                "linear map, a factor and a soft cap, or its layers read more than tokens and positions. Use a "
                "different model."
            )
        return found


def whole_pass(
    model: LanguageModel,
    tokens_N: Tensor,
    positions_N: Tensor,
    plan: AttentionPlan,
    run: Run | None,
    images: Mapping[int, tuple[Image, ...]] = MappingProxyType({}),
) -> Tensor:
    """Return the last hidden states of flat tokens, of shape (N, D), computed by the model's own modules.

    If `run` is given, it calls each block. The mapping `images` contains the images of a sequence by the index of the
    sequence's first token.
    """
    if model.flat is not None:
        return model.flat.hidden(tokens_N, positions_N, model.flat.by_plan(plan), run)
    pieces: list[Tensor] = []
    with nullcontext() if run is None else blocks_run_by(model.body, run):
        for place_BL in (bucket.query_BL for bucket in plan.buckets):
            inputs, positions = {"input_ids": tokens_N[place_BL]}, positions_N[place_BL]
            if model.vision is not None:
                seen_B = [images.get(first, ()) for first in place_BL[:, 0].tolist()]
                inputs, positions, _ = model.vision.inputs(inputs["input_ids"], [0] * len(seen_B), seen_B)
            with model.bank.rows_at(place_BL):
                output = model.body(**inputs, position_ids=positions, use_cache=False)
            pieces.append(output.last_hidden_state)
    joined = torch.cat([piece.flatten(0, 1) for piece in pieces])
    return joined if plan.where_N is None else joined.index_select(0, plan.where_N)


def load_language_model(config: ModelConfig, *, trained: bool = True) -> LanguageModel:
    """Build the embedded model, or load a model from a folder or from the hub. Raises ModelError if loading fails.

    If the weights are `trained`, they are stored in float32; otherwise, they are stored in the compute type.
    """
    from kapelle.models.embedded import build_model, build_tokenizer, image_processor

    options: dict[str, Any] = {
        "dtype": config.dtype,
        "kernels": config.kernels == "auto",
        "trains_router": config.router == "trained",
        "replays_routing": config.routing == "replayed",
        "float_head": config.head_dtype is not None,
    }
    if config.path == "embedded":
        if config.embedded.sees:
            need_pillow()
            options["image_processor"] = image_processor()
        own = build_tokenizer(config.embedded.context, sees=config.embedded.sees)
        tiny = build_model(config.embedded, len(own), int(own.eos_token_id or 0), int(own.pad_token_id or 0))
        if not trained:
            hold_in(tiny, DTYPES[config.dtype])
        return LanguageModel(tiny, own, name="embedded", **options).to(config.device)
    check_model_path(config.path)
    template = named_template(config.chat_template) if config.chat_template else None
    config = config.model_copy(update={"path": located(config.path, weights=True)})
    verify_folder(Path(config.path).expanduser())
    with loading(config.path):
        shape = read_config(config.path)
        options["image_processor"] = read_image_processor(config.path, shape)
        tokenizer: PreTrainedTokenizerBase = read_tokenizer(config.path)
        tokenizer.chat_template = template or tokenizer.chat_template
        codes: dict[str, Any] = {}
        if config.quantization is not None and not trained:
            from transformers import BitsAndBytesConfig

            # Linear layers in nf4 (2305.14314), with scales of one byte.
            settings = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=DTYPES[config.dtype],
            )
            codes = {"quantization_config": settings, "device_map": {"": config.device or "cuda"}}
        # transformers maps safetensors into memory and reads tensor by tensor, so tensors of the same type are never copied.
        # Moving is also done tensor by tensor, so that neither device holds much more than the weights.
        with bars_for_people():
            dtype = torch.float32 if trained else DTYPES[config.dtype]
            model = load_pretrained(auto_class(shape), config.path, dtype=dtype, **codes)
        if not codes:
            nn.Module.to(model, config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return LanguageModel(model, tokenizer, name=config.path, **options)


def hold_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights of a model to a type, one tensor at a time. Buffers such as rotary angles keep their type."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)


def copy_language_model(source: LanguageModel, name: str) -> LanguageModel:
    """Return a frozen copy of a base model that has no adapters."""
    import copy

    assert not source.bank.adapters, "only a bare base is copied"
    dtype = next(key for key, value in DTYPES.items() if value == source.dtype)
    return LanguageModel(
        copy.deepcopy(source.model),
        source.tokenizer,
        dtype,
        name,
        kernels=source.kernels,
        image_processor=source.vision and source.vision.processor,
        trains_router=source.trains_router,
        replays_routing=source.choices is not None,
        float_head=source.float_head,
    )


class OutputHead(NamedTuple):
    """The last linear map of a language model as plain data, for passes over a part of the vocabulary.

    The logits are `softcap · tanh(scale · (W h + b) / softcap)`, or `scale · (W h + b)` without a cap.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def finish(self, product_KV: Tensor) -> Tensor:
        """Return logits in at least float32, given the products `W h + b` for any part of the vocabulary."""
        logits_KV = product_KV if product_KV.itemsize >= 4 else product_KV.float()
        if self.scale != 1.0:
            logits_KV = logits_KV * self.scale
        if self.softcap is not None:
            logits_KV = (logits_KV / self.softcap).tanh() * self.softcap
        return logits_KV

    def slope(self, logits_KV: Tensor) -> Tensor | None:
        """Return the derivative of `finish` without the factor `scale`, given the logits, or None if the derivative is 1."""
        return None if self.softcap is None else 1 - (logits_KV / self.softcap).square()


def scale_and_cap(
    settings: Mapping[str, Any], product_KV: Tensor, logits_KV: Tensor, bound: float
) -> tuple[float, float | None] | None:
    """Return the factor and the soft cap that a model's settings define for its logits, or None if no interpretation fits.

    Granite divides its logits by a setting, Cohere and Falcon-H1 multiply their logits by a setting, and Gemma 2 caps
    its logits. With the same setting name (`logits_scaling`), some models divide and others multiply. Every
    interpretation of the settings is therefore a candidate, with the simplest interpretation last, and the model's own
    logits decide. The argument `bound` is the maximum difference relative to the norm of the logits.
    """
    expected_KV = logits_KV.float()
    scales = [float(settings[key]) for key in SCALES if isinstance(settings.get(key), float | int)]
    scales = [*scales, *(1 / scale for scale in scales if scale), 1.0]
    caps = [float(settings[key]) for key in CAPS if settings.get(key)]
    for cap, scale in product((*caps, None), scales):
        found_KV = OutputHead(product_KV, scale=scale, softcap=cap).finish(product_KV).float()
        if (found_KV - expected_KV).norm() <= bound * expected_KV.norm():
            return scale, cap
    return None


def recompute_blocks(bank: LoraBank) -> Run:
    """Return a function that runs a block, keeps only its arguments, and reruns it in the backward pass (arXiv:1604.06174).

    The backward pass runs after the route of the bank has been reset. Each block therefore stores the route, the
    dropout keys and the experts of its forward pass. The autocast settings are restored by torch.
    """

    def run(block: Callable[..., Any], *args: Any, **named: Any) -> Any:
        route, keys_N, experts_NLk = bank.route, bank.keys_N, bank.experts_NLk

        def routed(*args: Any, **named: Any) -> Any:
            with bank.on(route, keys_N, experts_NLk):
                return block(*args, **named)

        return checkpoint(routed, *args, use_reentrant=False, **named)

    return run


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder blocks of a `transformers` model. Raises ModelError if the architecture does not mark its blocks."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not found:
        raise ModelError(
            f"{type(model).__name__} does not mark its blocks, so they cannot be recomputed. Set "
            "`training.gradient_checkpointing: false`, and a lower `training.microbatch_tokens`."
        )
    return found


@contextmanager
def blocks_run_by(model: nn.Module, run: Run) -> Iterator[None]:
    """Call every block of a `transformers` model through `run` in this context."""
    blocks = blocks_of(model)
    for block in blocks:
        block.forward = partial(run, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def in_float32(model: LanguageModel) -> Iterator[None]:
    """Compute the forward passes of this context in float32, by widening the half-precision weights of each module while it runs.

    Afterwards, every weight is the same tensor as before, in the same memory.
    """
    dtype, model.dtype = model.dtype, torch.float32
    hooks = [
        hook
        for module in model.model.modules()
        if any(weight.dtype in HALF for weight in module.parameters(recurse=False))
        for hook in _widening_hooks(module)
    ]
    try:
        yield
    finally:
        model.dtype = dtype
        for hook in hooks:
            hook.remove()


def _widening_hooks(module: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Register hooks that widen the weights of a module before its pass and restore them after it, even if the pass fails."""
    widened: list[tuple[nn.Parameter, Tensor]] = []

    def widen(_module: nn.Module, _inputs: object) -> None:
        # Widen submodules too, because a state-space mixer reads its layers' weights directly.
        for weight in module.parameters():
            if weight.dtype in HALF:
                widened.append((weight, weight.data))
                weight.data = weight.data.float()

    def put_back(_module: nn.Module, _inputs: object, _output: object) -> None:
        while widened:
            weight, data = widened.pop()
            weight.data = data

    yield module.register_forward_pre_hook(widen)
    yield module.register_forward_hook(put_back, always_call=True)


class RewardModel:
    """A reward model of transformers in memory: a sequence classifier with one label that reads a whole conversation."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.renderer = ChatRenderer(tokenizer, context_of(model.config, tokenizer))

    @torch.inference_mode()
    def logits(self, conversations: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each conversation, given the token ids of the conversations."""
        pad = self.model.config.get_text_config().pad_token_id
        if (
            pad is None and len(conversations) > 1
        ):  # transformers finds the last token of a row by its padding
            return [logit for each in conversations for logit in self.logits([each])]
        longest = max(map(len, conversations))
        ids_BL = torch.full((len(conversations), longest), pad or 0)
        mask_BL = torch.zeros_like(ids_BL)
        for row, tokens in enumerate(conversations):
            ids_BL[row, : len(tokens)] = torch.tensor(tokens)
            mask_BL[row, : len(tokens)] = 1
        device = self.model.device
        logits_B1 = self.model(input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device)).logits
        return [float(logit) for logit in logits_B1[:, 0].float()]


def load_reward_model(folder: Path) -> RewardModel:
    """Load a reward model from a folder written by `save_pretrained`, in bfloat16 on a GPU and in float32 otherwise.

    Raises ModelError if loading fails.
    """
    path = str(folder)
    check_model_path(path)
    verify_folder(folder)
    from transformers import AutoModelForSequenceClassification

    with loading(path):
        config = read_config(path)
        if not any("ForSequenceClassification" in each for each in config.architectures or ()):
            raise ModelError(
                f"'{path}' is {', '.join(config.architectures or ['no architecture'])}, not a reward model. Use a "
                "sequence classifier with one label, or a run of `algorithm.name: verifier`."
            )
        if config.num_labels != 1:
            raise ModelError(
                f"The classifier '{path}' has {config.num_labels} labels. Use a classifier with a single label."
            )
        tokenizer = read_tokenizer(path)
        gpu = torch.cuda.is_available()
        with bars_for_people():
            dtype = torch.bfloat16 if gpu else torch.float32
            model = load_pretrained(AutoModelForSequenceClassification, path, dtype=dtype)
        return RewardModel(model.to("cuda" if gpu else "cpu"), tokenizer)
