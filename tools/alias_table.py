"""Write docs/coming_from/names.md: every name of another library that is read as one of ours, from `settings.aliases`.

    python tools/alias_table.py

A test compares the page with what this writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kapelle.settings.aliases import ARGUMENTS, TABLE, Alias

PAGE = Path(__file__).parents[1] / "docs" / "coming_from" / "names.md"
HEAD = """# Names that are read as ours

A setting may have the name that TRL (f2cd57710, 2026-07-24), verl (0.9.1) or CoMLRL (1.4.3) gives it, in a recipe, on the command line and in Python:

```sh
kapelle train demo learning_rate=2e-5 num_generations=4 beta=0.04 --dry-run
```

```python
import kapelle

def exact(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)

kapelle.train("embedded", train_dataset="train.jsonl", reward_funcs=exact, learning_rate=2e-5, num_generations=4, num_train_epochs=1)
```

One line says how each was read, and the run keeps kapelle's names. A value whose unit differs is converted, by what all sources say together;
names that change nothing here are ignored, and a value without a counterpart is an error. All errors are reported at once. If one source sets a name and ours, they must agree; of several sources the last has precedence.
verl's names nest as there, or stand as one dotted key. In Python, the arguments {arguments} are read too.
The pages [TRL](trl.md), [verl](verl.md) and [CoMLRL](comlrl.md) say what else is called what.
"""
TITLES = {
    "kapelle": "Short for ours",
    "TRL": "TRL, transformers, PEFT",
    "verl": "verl",
    "siiRL": "siiRL, beside verl's",
    "CoMLRL": "CoMLRL",
    "OpenRLHF": "OpenRLHF",
}


def rows(aliases: list[Alias]) -> Iterator[str]:
    """Yield a table's lines."""
    yield from ("| name | read as | how |", "|---|---|---|")
    for alias in aliases:
        ours = ", ".join(f"`{path}`" for path in alias.ours) or "–"
        yield f"| `{alias.name}` | {ours} | {alias.says} |"


def written() -> str:
    """Return the page."""
    arguments = ", ".join(f"`{name}` (`{ours}`)" for name, ours in ARGUMENTS.items())
    parts = [HEAD.format(arguments=arguments)]
    for library, title in TITLES.items():
        found = [alias for alias in TABLE if alias.library == library]
        parts.append("\n".join([f"\n## {title}\n", *rows(found)]) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
