"""Write the index of claims, a page and a picture for each claim, and the verdicts on the algorithms' pages, from the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.claim import Claim, Judged, Results, Verdict, claims, confirmed, overall, summed_up
from experiments.running import kept

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "claims.md"
FOLDER = DOCS / "claims"
ADVICE = DOCS / "explanations" / "which_algorithm.md"
PICTURES = DOCS / "pictures" / "claims"
BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"
SECTIONS: tuple[tuple[Verdict, str], ...] = (
    ("contradicted", "Contradicted"),
    ("shown", "Shown"),
    ("not shown", "Not shown"),
)
"""What libraries still promise comes first."""
ENOUGH = 10
"""Seeds with fewer of which a verdict states their number."""

HEAD = """# Claims

Each algorithm was published with a claim about what it improves. This page lists one experiment for each claim, with its
verdict: first the contradicted claims, then the shown ones, then the others.

{counts}

## How a verdict is reached

1. **Predictions first.** An experiment makes numeric predictions: a number that is measured once per seed, and a bound.
   All arms get the same number of sampled tokens, and one arm is an ablation as a control.
2. **Learning rates by a rule.** Each arm takes the rate with the greatest interquartile mean over five seeds. While an
   arm's best rate is at the edge of its grid, the grid is extended by its own ratio, at most three times on each side.
   Some experiments fix one rate; their pages state it.
3. **New seeds for the verdict.** The verdict uses other seeds, ten or more. The table of a claim gives the interquartile
   mean over seeds and its 95 % bootstrap interval. A prediction is *shown* if the whole interval satisfies the bound. It
   is *contradicted* if the whole interval lies beyond the limit in brackets or, if there is no such limit, on the other
   side of the bound. Otherwise it is *not shown*: the interval allows both verdicts, or the effect is too small.
4. **All of it again.** A repetition chooses the rates and judges with seeds that the first run did not use.

A claim is **shown** if all its predictions are shown in both runs. It is **contradicted** if one of its predictions is
contradicted in both runs. *Shown once* and *contradicted once* mean that the claim is not repeated yet. In all other cases it is
**not shown**. With fewer than ten seeds, the verdict states their number.

Most first runs chose rates with three seeds and did not extend the grid, as their pages state; the repetitions use the
rule above. The experiment's file describes the setting and states which settings were changed after a first run. Most
experiments train tables of logits on [diagnostic environments](environments/generated.md#diagnostic-environments), for
which the exact return is known; a few train a tiny language model.

```sh
python -m experiments run group_baseline            # one experiment; results go to experiments/results
python -m experiments run group_baseline --repeat   # its repetition; results go to experiments/results/repeated
python -m experiments run quick                     # a check with a few seeds; fails if a verdict changes
```

In predictions, `area` is the mean of the learning curve over the sampled tokens, and `end` is its final value.
*P(better)* is the probability that a run of the first arm is better than a run of the second.
"""


@dataclass(frozen=True)
class Entry:
    """A claim and what came of it."""

    claim: Claim
    first: Results
    repeated: Results | None = None

    def judged(self) -> list[Judged]:
        """Return the predictions of the first run, with the verdicts of both runs if there are two."""
        first = self.first.judge(self.claim)
        return first if self.repeated is None else confirmed(first, self.repeated.judge(self.claim))

    def verdict(self, algorithm: str | None = None) -> Verdict:
        """Return the claim's verdict, or that of its predictions about an algorithm."""
        return overall(self.judged(), algorithm)

    def words(self, algorithm: str | None = None) -> str:
        """Return the verdict as Markdown: bold if it is final, with the numbers of seeds where one is below ten."""
        verdict = self.verdict(algorithm)
        once = self.repeated is None and verdict != "not shown"
        seeds = [run.seeds for run in (self.first, self.repeated) if run is not None]
        few = f" in {' and '.join(map(str, seeds))} seeds" if min(seeds) < ENOUGH else ""
        return (f"{verdict} once" if once else f"**{verdict}**") + few

    def brief(self) -> str:
        """Return the verdict in two or three words; *in part* if more than half of the predictions are shown."""
        verdict = self.verdict()
        parts = [each.verdict == "shown" for each in self.judged()]
        if verdict == "not shown":
            return "in part" if sum(parts) > len(parts) / 2 else verdict
        if self.repeated is None:
            return f"{verdict} once"
        return verdict if verdict == "shown" or not any(parts) else f"{verdict} in part"

    def count(self) -> str:
        """Return how many of the predictions are shown."""
        judged = self.judged()
        return f"{sum(each.verdict == 'shown' for each in judged)} of {len(judged)} shown"

    def repetition(self) -> str:
        """Return the verdict of the repetition alone; a dash where there is none."""
        if self.repeated is None:
            return "–"
        verdict = overall(self.repeated.judge(self.claim))
        same = verdict == overall(self.first.judge(self.claim))
        return f"{verdict} again" if same else verdict


def entries() -> dict[str, Entry]:
    """Return all claims with results, by name."""
    return {
        name: Entry(claim, first, kept(name, repeated=True))
        for name, claim in claims().items()
        if (first := kept(name))
    }


def write_page() -> None:
    """Write the index, a page for each claim, the pictures and the algorithms' verdicts."""
    known = entries()
    PICTURES.mkdir(parents=True, exist_ok=True)
    FOLDER.mkdir(exist_ok=True)
    for name, entry in known.items():
        draw(entry.claim, entry.first, PICTURES / f"{name}.svg")
        (FOLDER / f"{name}.md").write_text(claim_page(entry), "utf-8")
    PAGE.write_text(page_of(known), "utf-8")
    for algorithm in sorted({name for entry in known.values() for name in entry.claim.algorithms}):
        file = DOCS / "algorithms" / f"{algorithm}.md"
        file.write_text(with_verdicts(file.read_text("utf-8"), algorithm, known), "utf-8")
    ADVICE.write_text(with_brief(ADVICE.read_text("utf-8"), known), "utf-8")


def page_of(known: Mapping[str, Entry]) -> str:
    """Return the index as Markdown."""
    lines = [HEAD.replace("{counts}", counts(known))]
    for verdict, title in SECTIONS:
        found = [entry for entry in known.values() if entry.verdict() == verdict]
        found.sort(key=lambda entry: entry.repeated is None)
        lines.append(f"\n## {title}\n\n")
        lines.append(
            "| claim | algorithms | verdict | repeated with new seeds | predictions | CPU |\n|---|---|---|---|---|---|\n"
        )
        lines += map(_row, found)
        if verdict == "contradicted":
            lines += [
                f"\n[`{entry.claim.name}`](claims/{entry.claim.name}.md): {entry.words()}.\n\n"
                f"![{entry.claim.claim}](pictures/claims/{entry.claim.name}.svg)\n"
                for entry in found
            ]
    return "".join(lines)


def counts(known: Mapping[str, Entry]) -> str:
    """Return how many claims have which verdict."""
    words = Counter(entry.words().partition(" in ")[0].replace("*", "") for entry in known.values())
    order = ("contradicted", "contradicted once", "shown", "shown once", "not shown")
    found = ", ".join(f"{words[one]} {one}" for one in order if words[one])
    repeated = sum(entry.repeated is not None for entry in known.values())
    return f"Of {len(known)} claims, {repeated} are repeated. Verdicts: {found}."


def _row(entry: Entry) -> str:
    claim = entry.claim
    pages = (
        ", ".join(f"[{each}](algorithms/{each}.md)" for each in claim.algorithms) or "[leagues](leagues.md)"
    )
    return (
        f'| <a id="{claim.name}"></a>[{claim.claim}](claims/{claim.name}.md) | {pages} | {entry.words()} '
        f"| {entry.repetition()} | {entry.count()} | {_time(entry.first.seconds)} |\n"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _chance(improvement: float | None) -> str:
    return "" if improvement is None else f"{improvement:.2f}"


def _interval(judged: Judged) -> str:
    return f"{judged.middle:.3g} [{judged.low:.3g}, {judged.high:.3g}]"


def claim_page(entry: Entry) -> str:
    """Return the page of a claim as Markdown."""
    claim, first, repeated = entry.claim, entry.first, entry.repeated
    again = ["–"] * len(claim.predictions)
    if repeated is not None:
        again = [_interval(each) for each in repeated.judge(claim)]
    rows = "".join(
        f"| {each.says} | {each.bound} | {_interval(each)} | {new} | {_chance(each.improvement)} | {each.verdict} |\n"
        for each, new in zip(entry.judged(), again, strict=True)
    )
    rates = "".join(
        rates_of(results, title)
        for results, title in ((first, "First run"), (repeated, "Repetition"))
        if results
    )
    seeds = f"{first.seeds} seeds" + (f", repeated with {repeated.seeds}" if repeated else ", not repeated")
    files = f"[settings and remarks](../../experiments/claims/{claim.name}.py), [results](../../experiments/results/{claim.name}.json)"
    if repeated is not None:
        files += f", [repetition](../../experiments/results/repeated/{claim.name}.json)"
    source = re.sub(r"(?<![\w.:/])(\d{4}\.\d{5})", r"arXiv:\1", claim.source)
    return (
        f"# Claim `{claim.name}`\n\n{claim.claim}.\n\n"
        f"- Verdict: {entry.words().partition(' in ')[0]} ({seeds})\n- Source: {source}\n- Files: {files}\n\n"
        f"| prediction | bound | measured | repeated | P(better) | verdict |\n|---|---|---|---|---|---|\n{rows}\n{rates}"
        f"![{claim.claim}](../pictures/claims/{claim.name}.svg)\n\n"
        f"```sh\npython -m experiments run {claim.name}  # {_time(first.seconds)} of one core\n```\n"
    )


def rates_of(results: Results, title: str) -> str:
    """Return which learning rates were tried and chosen, and whose best lies at the edge of its grid; nothing if none was chosen."""
    if not results.tried:
        return ""
    tried = sorted({float(rate) for grid in results.tried.values() for rate in grid})
    chosen = ", ".join(f"`{arm}` {rate:g}" for arm, rate in results.rates.items())
    edge = [
        f"`{arm}`"
        for arm, grid in results.tried.items()
        if results.rates[arm] in (min(map(float, grid)), max(map(float, grid)))
    ]
    beyond = f" At the edge of their grid: {', '.join(edge)}." if edge else ""
    return (
        f"{title}: learning rates tried with {results.sweep} seeds: {', '.join(f'{rate:g}' for rate in tried)}; "
        f"chosen: {chosen}.{beyond}\n\n"
    )


def with_verdicts(text: str, algorithm: str, known: Mapping[str, Entry]) -> str:
    """Return an algorithm's page with a final line that links to the algorithm's claims, grouped by verdict."""
    links: dict[str, list[str]] = {}
    for name, entry in known.items():
        if algorithm in entry.claim.algorithms:
            verdict = entry.words(algorithm).replace("**", "")
            links.setdefault(verdict, []).append(f"[`{name}`](../claims/{name}.md)")
    line = "; ".join(
        f"{verdict}: {', '.join(names)}" for verdict, names in sorted(links.items(), reverse=True)
    )
    block = f"{BEGIN}\n**Claims** – {line}\n{END}"
    if BEGIN in text:
        return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: block, text, flags=re.DOTALL)
    return f"{text.rstrip()}\n\n{block}\n"


def with_brief(text: str, known: Mapping[str, Entry]) -> str:
    """Return a text whose links to claims state their verdicts, where they stated one before."""
    stated = r"\[(?:shown|not shown|in part|contradicted)(?: in part)?(?: once)?\]\(\.\./claims\.md#(\w+)\)"
    return re.sub(stated, lambda found: f"[{known[found[1]].brief()}](../claims.md#{found[1]})", text)


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
