"""Format the results of evaluations as the table of lm-eval or as the `model-index` of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kapelle.runs.findings import measured
from kapelle.runs.model_card import eval_results

FORMS = ("lm-eval", "hub")
"""Names of the formats that `kapelle eval --table` accepts."""


def table_of(form: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of `kapelle eval --json` in one of the formats in `FORMS`."""
    assert form in FORMS, f"a form is one of {FORMS}"
    return lm_eval_table(rows) if form == "lm-eval" else hub_index(rows)


def lm_eval_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a Markdown table in the format of `lm_eval`."""
    head = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
    lines = []
    for row in rows:
        shown = None
        # A benchmark states its examples and the parser of its success.
        about = row.get("benchmark") or {"metric": "none", "shots": 0}
        for own, metric, value, error in measured(row):
            task = own or row["environment"]
            spread = "N/A" if error is None else f"{error:.4f}"
            name, shown = ("" if task == shown else task), task
            lines.append(
                (name, "1", about["metric"], str(about["shots"]), metric, "↑", f"{value:.4f}", "±", spread)
            )
    widths = [max(len(line[place]) for line in [head, *lines]) for place in range(len(head))]
    right = {1, 3, 6, 8}  # numbers

    def written(line: Sequence[str]) -> str:
        return (
            "|"
            + "|".join(
                text.rjust(width) if place in right else text.ljust(width)
                for place, (text, width) in enumerate(zip(line, widths, strict=True))
            )
            + "|"
        )

    rule = "|".join(
        "-" * (width - 1) + ":" if place in right else "-" * width for place, width in enumerate(widths)
    )
    return "\n".join([written(head), f"|{rule}|", *map(written, lines)])


def hub_index(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as the front matter of a model card (`model-index`), which the Hugging Face Hub displays."""
    import yaml
    from huggingface_hub.repocard_data import eval_results_to_model_index

    name = str(rows[0]["player"]).rstrip("/").rsplit("/", 1)[-1]
    index = {"model-index": eval_results_to_model_index(name, eval_results(rows))}
    return f"---\n{yaml.safe_dump(index, sort_keys=False, allow_unicode=True)}---"
