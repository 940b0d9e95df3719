"""Comparison of algorithms on one recipe: the same tasks, the same number of episodes, several seeds.

<folder>/
  compare.json       budget and results; see `results`
  compare.csv        one row per run
  figure.pdf         for a paper, also figure.png and figure.svg, with matplotlib; see `figures`
  grpo/seed-0/       the run directory of one contender and seed
  grpo/seed-1.error.txt     why a run failed

`plot` draws the figure from any results.
"""

from kapelle.comparison.figures import plot

__all__ = ["plot"]
