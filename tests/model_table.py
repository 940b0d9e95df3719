"""What kapelle can do with each architecture, tried on tiny models: `python -m tests.model_table` writes docs/models.md.

The page keeps its prose; what stands between the two marks is made again. A test compares it row by row.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.families import FAMILIES, family_model

from kapelle.engines.rollout.local.decode_strategies import decode_strategy
from kapelle.errors import ModelError
from kapelle.models.adapters import linear_layers, named
from kapelle.models.fast.attention import plan_sequences
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import layers_of
from kapelle.team import Lora

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MARKS = ("<!-- python -m tests.model_table -->\n", "<!-- end of the table -->\n")
HEAD = (
    "| family | `all-linear` adapts | excludes | training pass | decoding | logits | critic |\n"
    "|---|---|---|---|---|---|---|\n"
)
DECODING = {
    "flat": "own pass",
    "plain_cache": "`transformers`, KV cache",
    "cache_by_layer": "`transformers`, states",
    "reread": "re-reads each text",
}


def row(family: str) -> str:
    """Return a family's line of the table."""
    try:
        model = family_model(family)
    except ModelError as error:
        reason = str(error).partition(". ")[0].replace(": ", ", because ", 1)
        return f"| {family} | unsupported: {reason} | | | | | |\n"
    lora = named(layers_of(model.model), Lora())
    taken = {target.rpartition(".")[2] for target in lora.targets}
    layers = layers_of(model.model)
    spare = sorted({path.rpartition(".")[2] for path in linear_layers(layers)} - taken)
    spare += ["experts"] if layers.experts else []
    way = decode_strategy(model)
    attention = model.model.config._attn_implementation.replace("sdpa", "fused").replace("eager", "plain")
    cells = (
        family,
        ", ".join(lora.targets),
        ", ".join(spare),
        "own, flat" if model.flat else f"`transformers`, padded, {attention} attention",
        DECODING[way.name if way.cache_of is None else way.cache_of.__name__],
        _logits(model),
        "yes" if _judges(model) else "no",
    )
    return f"| {' | '.join(cells)} |\n"


def _logits(model: LanguageModel) -> str:
    head = model.head
    found = [name for name, used in (("factor", head.scale != 1.0), ("soft cap", head.softcap)) if used]
    return ", ".join(found)


def _judges(model: LanguageModel) -> bool:
    """Return whether a critic's adapter gets a gradient from the values of its head."""
    model.bank.add("critic", Lora(rank=2), seed=0)
    model.add_value_head("critic")
    torch.nn.init.ones_(model.value_heads["critic"].weight)
    tokens_N = torch.arange(5, 16)
    with model.computing([("critic", 0, 11)]):
        hidden_ND = model.hidden(tokens_N, tokens_N - 5, plan_sequences([11]))
        values_N = model.values("critic", hidden_ND)
    values_N.square().sum().backward()
    grads = [p.grad for name, p in model.bank.parameters("critic").items() if "lora_B" in name]
    return bool(values_N.isfinite().all()) and all(grad is not None and bool(grad.any()) for grad in grads)


def between_marks(page: str) -> tuple[str, str, str]:
    """Return a page up to the table, the table, and the rest."""
    before, _, rest = page.partition(MARKS[0])
    table, _, after = rest.partition(MARKS[1])
    return before + MARKS[0], table, MARKS[1] + after


def main() -> None:
    """Write the table of the page."""
    before, _, after = between_marks(PAGE.read_text("utf-8"))
    PAGE.write_text(before + HEAD + "".join(row(family) for family in FAMILIES) + after, "utf-8")


if __name__ == "__main__":
    main()
