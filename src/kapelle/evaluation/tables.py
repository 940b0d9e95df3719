"""Results of evaluations in the forms in which others read them: lm-eval's table, and the Hub's `model-index`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FORMS = ("lm-eval", "hub")
"""Names of the forms, as `kapelle eval --table` takes them."""


def table_of(form: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return results, rows as `kapelle eval --json` prints them, in one of `FORMS`."""
    assert form in FORMS, f"a form is one of {FORMS}"
    return lm_eval_table(rows) if form == "lm-eval" else hub_index(rows)


def measured(row: Mapping[str, Any]) -> list[tuple[str, str, float, float | None]]:
    """Return (set, metric, value, standard error) of every rate of one evaluation, in the order in which they were measured.

    The set's name is empty for the run's own environment. Its metric is `success`, or each agent's return where nothing is solved.
    """
    team = row["team"]
    found = []
    if team["success"] is not None:
        found.append(("", "success", team["success"], team["stderr"]))
    else:
        found += [("", f"return/{agent}", value, None) for agent, value in team["reward"].items()]
    for name, part in team["parts"].items():
        if part["success"] is None:
            continue
        first, _, rest = name.partition(" ")
        own = first in row["sets"]
        found.append(
            (first if own else "", (rest if own else name) or "success", part["success"], part["stderr"])
        )
    return found


def lm_eval_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table that `lm_eval` prints, so that the results stand beside its own."""
    head = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
    lines = []
    for row in rows:
        shown = None
        for own, metric, value, error in measured(row):
            task = own or row["environment"]
            spread = "N/A" if error is None else f"{error:.4f}"
            name, shown = ("" if task == shown else task), task
            lines.append((name, "1", "none", "0", metric, "↑", f"{value:.4f}", "±", spread))
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
    """Return the results as the front matter of a model card (`model-index`), from which the Hub shows them."""
    import yaml
    from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=own or row["environment"],
            dataset_name=own or row["environment"],
            dataset_split="test",
            metric_type=metric,
            metric_name=metric if error is None else f"{metric} (± {error:.4f} standard error)",
            metric_value=round(value, 6),
        )
        for row in rows
        for own, metric, value, error in measured(row)
    ]
    name = str(rows[0]["player"]).rstrip("/").rsplit("/", 1)[-1]
    index = {"model-index": eval_results_to_model_index(name, results)}
    return f"---\n{yaml.safe_dump(index, sort_keys=False, allow_unicode=True)}---"
