"""Compares algorithms on one recipe, with the same tasks, the same number of episodes, and several seeds.

<folder>/
  compare.json       budget and results; see `results`
  compare.csv        one row per run
  figure.pdf         a figure for a paper (also figure.png and figure.svg; needs matplotlib), see `figures`
  grpo/seed-0/       the run directory of one contender and seed
  grpo/seed-1.error.txt     why a run failed

The function `plot` draws a figure like `figure.pdf` from any results.
"""

from kapelle.comparison.figures import plot

__all__ = ["plot"]
