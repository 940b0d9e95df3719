"""The page of the claims, its pictures, and the verdicts at the top of the algorithms' pages, all made from the results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.claim import Claim, Results, claims, overall, summed_up
from experiments.running import kept

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "claims.md"
PICTURES = DOCS / "pictures" / "claims"
BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"
SIGN = {"shown": "**shown**", "not shown": "**not shown**", "contradicted": "**contradicted**"}

HEAD = """# Claims

Every method was published with a claim: why it should do better than a simpler one, and when. Here such a claim is an experiment that could have
failed: a prediction in numbers, arms of which one is the ablation of the very piece, equal numbers of sampled tokens and ten seeds or more (fewer where language models play, which the verdict
then says), and a verdict by a rule. Teams are mostly tables of logits, which play the [diagnostic environments](environments/generated.md#diagnostic-environments) through the library's own rollout, credit, packing, loss
and optimiser, so that a team's worth is known exactly.

```sh
python -m experiments run group_baseline     # one claim, kept in experiments/results
python -m experiments run quick              # what is cheap, as a check: fails if a verdict turns
python -m experiments run all --jobs 2       # everything; continues where it was stopped
```

A prediction is a number for each seed, computed from what all arms did with that seed. The tables give its interquartile mean over seeds with a 95 %
bootstrap interval. *Shown*: the whole interval keeps the bound. *Contradicted*: the whole interval lies beyond the limit in brackets, or on the other side of the bound where there is none. *Not shown*: neither,
or an effect smaller than predicted. A claim is shown if all its predictions are, and contradicted if one is; an algorithm's page gives the verdict on those about this algorithm. Where a setting was changed after a first run, the remark says what was changed; that is weaker evidence. *P(better)* is the chance that a run of the first arm is better than one of the second, over all pairs of runs. Learning rates are chosen for every arm from the same list by three further seeds.

"""


def verdict_of(claim: Claim, results: Results, algorithm: str | None = None) -> str:
    """Return a claim's verdict in print, or that of its predictions about an algorithm.

    With fewer than five seeds it says their number too, as an interval is then little more than their range.
    """
    sign = SIGN[overall(results.judge(claim), algorithm)]
    return sign if results.seeds >= 5 else f"{sign} in {results.seeds} seeds"


def write_page() -> None:
    """Write the page, the pictures and the algorithms' verdicts."""
    known = {name: (claim, results) for name, claim in claims().items() if (results := kept(name))}
    PICTURES.mkdir(parents=True, exist_ok=True)
    for claim, results in known.values():
        draw(claim, results, PICTURES / f"{claim.name}.svg")
    PAGE.write_text(page_of(known), "utf-8")
    for algorithm in sorted({name for claim, _ in known.values() for name in claim.algorithms}):
        file = DOCS / "algorithms" / f"{algorithm}.md"
        file.write_text(with_verdicts(file.read_text("utf-8"), algorithm, known), "utf-8")


def page_of(known: Mapping[str, tuple[Claim, Results]]) -> str:
    """Return the text of the page."""
    lines = [HEAD]
    lines += ["| claim | of | verdict | CPU |\n|---|---|---|---|\n"]
    for name, (claim, results) in known.items():
        pages = (
            ", ".join(f"[{each}](algorithms/{each}.md)" for each in claim.algorithms)
            or "[leagues](leagues.md)"
        )
        lines.append(
            f"| [{claim.claim}](#{name}) | {pages} | {verdict_of(claim, results)} | {_time(results.seconds)} |\n"
        )
    for claim, results in known.values():
        lines.append(_section(claim, results))
    return "".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _chance(improvement: float | None) -> str:
    return "" if improvement is None else f"{improvement:.2f}"


def _section(claim: Claim, results: Results) -> str:
    judged = results.judge(claim)
    rows = "".join(
        f"| {each.says} | {each.bound} | {each.middle:.3g} [{each.low:.3g}, {each.high:.3g}] | {_chance(each.improvement)} | {each.verdict} |\n"
        for each in judged
    )
    rates = ""
    if len(claim.rates) > 1:
        chosen = ", ".join(f"`{arm}` {rate:g}" for arm, rate in results.rates.items())
        rates = f" Rates tried for each: {', '.join(f'{rate:g}' for rate in claim.rates)}; taken: {chosen}."
    remark = f"\n{claim.remark}\n" if claim.remark else ""
    return (
        f'\n<a id="{claim.name}"></a>\n\n## {claim.claim}\n\n'
        f"{verdict_of(claim, results)} · {claim.source} · [the experiment](../experiments/claims/{claim.name}.py)\n\n"
        f"{claim.setting} {results.seeds} seeds.{rates}\n\n"
        f"| prediction | bound | measured | P(better) | |\n|---|---|---|---|---|\n{rows}{remark}\n"
        f"![{claim.claim}](pictures/claims/{claim.name}.svg)\n"
    )


def with_verdicts(text: str, algorithm: str, known: Mapping[str, tuple[Claim, Results]]) -> str:
    """Return an algorithm's page with one line at its end: the verdicts on its claims, each a link to the page of claims."""
    links: dict[str, list[str]] = {}
    for name, (claim, results) in known.items():
        if algorithm in claim.algorithms:
            verdict = verdict_of(claim, results, algorithm).replace("**", "")
            links.setdefault(verdict, []).append(f"[`{name}`](../claims.md#{name})")
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
    """Draw what was measured."""
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
        axes.set(xlabel="sampled tokens", ylabel=claim.plotted[2] or "what the team earns")
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
