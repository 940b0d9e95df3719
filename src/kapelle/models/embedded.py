"""The embedded model, which kapelle creates itself, has the Qwen3 architecture, about a million weights, and bytes as tokens.

The embedded model is a tiny causal language model. The embedded model is initialised from a seed and warmed up on
scripted demonstrations, so that every algorithm runs on a laptop without a download. The tokeniser of the embedded
model has one token per byte, so that it can read any text, and one token per role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kapelle.settings.schema import EmbeddedConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, END, *(f"<|{role}|>" for role in ROLES))
"""The first tokens of the vocabulary. The tokens of the 256 bytes follow after them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


EYES = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""The last tokens of the vocabulary of the vision-language variant, which have the same names as Qwen's tokens."""

SEEING_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(context: int, *, sees: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokeniser with the 256 bytes, a few special tokens and a chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(SPECIAL[2:]),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if sees:
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[2:], *EYES]})
        tokenizer.chat_template = SEEING_TEMPLATE
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return the byte tokeniser as an object of the library tokenizers, without a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return raw


def settings_of(config: EmbeddedConfig) -> dict[str, Any]:
    """Return the architecture of the embedded model as the fields of a `config.json`."""
    return {
        "model_type": "qwen3",
        "vocab_size": len(SPECIAL) + 256,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.hidden // config.heads,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": True,
    }


def image_processor() -> Any:
    """Return the image processor of the vision-language variant: patches of 4 × 4 pixels, images of at most 32 × 32 pixels."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=1,
        merge_size=2,
        size={"shortest_edge": 64, "longest_edge": 1024},
    )


PATCH = 4


def _seeing_model(config: EmbeddedConfig, vocabulary: int, end_id: int, pad_id: int) -> PreTrainedModel:
    """Return an untrained model with the architecture of Qwen2.5-VL (arXiv:2502.13923)."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {key: value for key, value in settings_of(config).items() if key not in ("model_type", "head_dim")}
    pairs = config.hidden // config.heads // 2  # rotated pairs of numbers, for time, height and width
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    begin = vocabulary - len(EYES)
    made = Qwen2_5_VLConfig(
        text_config={
            **text,
            "vocab_size": vocabulary,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections},
            "initializer_range": 0.7 * config.hidden**-0.5,
            "bos_token_id": None,
            "eos_token_id": end_id,
            "pad_token_id": pad_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": config.hidden,
            "patch_size": PATCH,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        },
        image_token_id=begin + 1,
        video_token_id=begin + 3,
        vision_start_token_id=begin,
        vision_end_token_id=begin + 2,
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(made)


def build_model(config: EmbeddedConfig, vocabulary: int, end_id: int, pad_id: int) -> PreTrainedModel:
    """Return an untrained Qwen3 causal LM (arXiv:2505.09388) or vision-language model. The weights depend only on `config`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = {key: value for key, value in settings_of(config).items() if key != "model_type"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.sees:
            return _seeing_model(config, vocabulary, end_id, pad_id)
        return Qwen3ForCausalLM(
            Qwen3Config(
                **{**settings, "vocab_size": vocabulary},
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
                # The usual 0.02 suits wide models; in a narrow model the inputs would have almost no effect at first.
                initializer_range=0.7 * config.hidden**-0.5,
                bos_token_id=None,
                eos_token_id=end_id,
                pad_token_id=pad_id,
            )
        )
