"""Write the index of claims, a page and a picture for each claim, and the verdicts on the algorithms' pages, from the results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.claim import Claim, Results, claims, overall, summed_up
from experiments.running import kept

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "claims.md"
FOLDER = DOCS / "claims"
PICTURES = DOCS / "pictures" / "claims"
BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"
SIGN = {"shown": "**shown**", "not shown": "**not shown**", "contradicted": "**contradicted**"}

HEAD = """# Claims

Each algorithm was published with a claim about what it improves. This page lists one experiment for each claim. Every
experiment has numeric predictions, an ablation as a control arm, equal numbers of sampled tokens, and a verdict by a
fixed rule. Most experiments train tables of logits on
[diagnostic environments](environments/generated.md#diagnostic-environments), for which the exact return is known; a few
train a tiny language model.

```sh
python -m experiments run group_baseline     # repeat one experiment; results go to experiments/results
python -m experiments run quick              # a check with a few seeds; fails if a verdict changes
python -m experiments run all --jobs 2       # all experiments; an interrupted run continues
```

A prediction sets a bound for a number that is measured once per seed. The table of a claim gives the interquartile mean
over seeds and its 95 % bootstrap interval. Most experiments have ten seeds; the page of a claim states the number. In
predictions, `area` is the mean of the learning curve over the sampled tokens, and `end` is its final value.

- **Shown**: the whole interval satisfies the bound.
- **Contradicted**: the whole interval lies beyond the limit in brackets or, if there is no such limit, on the other side of the
  bound.
- **Not shown**: the interval allows both verdicts, or the effect is smaller than predicted.

A claim is shown if all its predictions are shown, and contradicted if any prediction is contradicted. *P(better)* is the
probability that a run of the first arm is better than a run of the second. For every arm, the learning rate is chosen
from the same list with three separate seeds. The experiment's file describes the setting and states which settings were
changed after a first run.

"""


def verdict_of(claim: Claim, results: Results, algorithm: str | None = None) -> str:
    """Return a claim's verdict as Markdown, or the verdict of its predictions about one algorithm.

    With fewer than five seeds, the verdict includes the number of seeds, because an interval is then little more than their range.
    """
    sign = SIGN[overall(results.judge(claim), algorithm)]
    return sign if results.seeds >= 5 else f"{sign} in {results.seeds} seeds"


def write_page() -> None:
    """Write the index, a page for each claim, the pictures and the algorithms' verdicts."""
    known = {name: (claim, results) for name, claim in claims().items() if (results := kept(name))}
    PICTURES.mkdir(parents=True, exist_ok=True)
    FOLDER.mkdir(exist_ok=True)
    for claim, results in known.values():
        draw(claim, results, PICTURES / f"{claim.name}.svg")
        (FOLDER / f"{claim.name}.md").write_text(claim_page(claim, results), "utf-8")
    PAGE.write_text(page_of(known), "utf-8")
    for algorithm in sorted({name for claim, _ in known.values() for name in claim.algorithms}):
        file = DOCS / "algorithms" / f"{algorithm}.md"
        file.write_text(with_verdicts(file.read_text("utf-8"), algorithm, known), "utf-8")


def page_of(known: Mapping[str, tuple[Claim, Results]]) -> str:
    """Return the index as Markdown."""
    lines = [HEAD]
    lines += ["| claim | algorithms | verdict | predictions shown | CPU |\n|---|---|---|---|---|\n"]
    for name, (claim, results) in known.items():
        pages = (
            ", ".join(f"[{each}](algorithms/{each}.md)" for each in claim.algorithms)
            or "[leagues](leagues.md)"
        )
        judged = results.judge(claim)
        shown = sum(each.verdict == "shown" for each in judged)
        lines.append(
            f'| <a id="{name}"></a>[{claim.claim}](claims/{name}.md) | {pages} | {verdict_of(claim, results)} '
            f"| {shown} of {len(judged)} | {_time(results.seconds)} |\n"
        )
    return "".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _chance(improvement: float | None) -> str:
    return "" if improvement is None else f"{improvement:.2f}"


def claim_page(claim: Claim, results: Results) -> str:
    """Return the page of a claim as Markdown."""
    rows = "".join(
        f"| {each.says} | {each.bound} | {each.middle:.3g} [{each.low:.3g}, {each.high:.3g}] | {_chance(each.improvement)} | {each.verdict} |\n"
        for each in results.judge(claim)
    )
    rates = ""
    if len(claim.rates) > 1:
        chosen = ", ".join(f"`{arm}` {rate:g}" for arm, rate in results.rates.items())
        rates = (
            f"Learning rates tried: {', '.join(f'{rate:g}' for rate in claim.rates)}; chosen: {chosen}.\n\n"
        )
    verdict = SIGN[overall(results.judge(claim))]
    source = re.sub(r"(?<![\w.:/])(\d{4}\.\d{5})", r"arXiv:\1", claim.source)
    return (
        f"# Claim `{claim.name}`\n\n{claim.claim}.\n\n"
        f"- Verdict: {verdict} ({results.seeds} seeds)\n- Source: {source}\n"
        f"- Files: [settings and remarks](../../experiments/claims/{claim.name}.py), "
        f"[results](../../experiments/results/{claim.name}.json)\n\n"
        f"| prediction | bound | measured | P(better) | verdict |\n|---|---|---|---|---|\n{rows}\n{rates}"
        f"![{claim.claim}](../pictures/claims/{claim.name}.svg)\n\n"
        f"```sh\npython -m experiments run {claim.name}  # {_time(results.seconds)} of one core\n```\n"
    )


def with_verdicts(text: str, algorithm: str, known: Mapping[str, tuple[Claim, Results]]) -> str:
    """Return an algorithm's page with a final line that links to the algorithm's claims, grouped by verdict."""
    links: dict[str, list[str]] = {}
    for name, (claim, results) in known.items():
        if algorithm in claim.algorithms:
            verdict = verdict_of(claim, results, algorithm).replace("**", "")
            links.setdefault(verdict, []).append(f"[`{name}`](../claims/{name}.md)")
    line = "; ".join(
        f"{verdict}: {', '.join(names)}" for verdict, names in sorted(links.items(), reverse=True)
    )
    block = f"{BEGIN}\n**Claims** – {line}\n{END}"
    if BEGIN in text:
        return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: block, text, flags=re.DOTALL)
    return f"{text.rstrip()}\n\n{block}\n"


# -------- Pictures

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c4554d", "#787774", "#cb912f", "#6b4226")


def draw(claim: Claim, results: Results, file: Path) -> None:
    """Draw the measurements of a claim."""
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "kapelle"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    if claim.plot == "curves":
        for (arm, (tokens, middle, low, high)), colour in zip(
            results.curves.items(), COLOURS * 9, strict=False
        ):
            axes.plot(tokens, middle, label=arm, color=colour)
            axes.fill_between(tokens, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.set(xlabel="sampled tokens", ylabel=claim.plotted[2] or "team return")
    elif claim.plot == "bars":
        _bars(axes, claim, results)
    else:
        _lines(axes, claim, results)
    named: dict[float, list[str]] = {}
    for name, worth in claim.landmarks().items():
        named.setdefault(round(worth, 3), []).append(name)
    for worth, names in named.items():
        axes.axhline(worth, color="#9b9a97", linestyle=":", linewidth=1)
        axes.annotate(
            ", ".join(names),
            (1.0, worth),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize="x-small",
            color="#787774",
        )
    if claim.plot != "bars":
        axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})


def _bars(axes: Any, claim: Claim, results: Results) -> None:
    measure, x, y = claim.plotted
    for k, rows in enumerate(results.runs.values()):
        numbers = [row[measure] for row in rows]
        middle, low, high = summed_up(numbers)
        axes.bar(k, middle, 0.6, color=COLOURS[k % len(COLOURS)], alpha=0.75)
        axes.errorbar(k, middle, yerr=[[middle - low], [high - middle]], color="#37352f", capsize=3)
        axes.scatter([k] * len(numbers), numbers, s=6, color="#37352f", alpha=0.4, zorder=3)
    axes.set_xticks(range(len(results.runs)), list(results.runs))
    axes.set(xlabel=x, ylabel=y or measure)
    if claim.logarithmic:
        axes.set_yscale("log")


def _lines(axes: Any, claim: Claim, results: Results) -> None:
    from matplotlib.ticker import LogLocator

    measure, x, y = claim.plotted
    series: dict[str, list[tuple[float, float, float, float]]] = {}
    for arm, rows in results.runs.items():
        name, _, place = arm.rpartition(" @ ")
        series.setdefault(name, []).append((float(place), *summed_up([row[measure] for row in rows])))
    for (name, points), colour in zip(series.items(), COLOURS * 9, strict=False):
        places, middle, low, high = zip(*points, strict=True)
        axes.plot(places, middle, marker="o", label=name, color=colour)
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set(xlabel=x, ylabel=y or measure)
    if claim.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.minorticks_off()
    ticks = sorted({point[0] for points in series.values() for point in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
