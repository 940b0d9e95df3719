"""Algorithms compared on one recipe: the same tasks, the same number of episodes, several seeds.

<folder>/
  compare.json       what was asked and what came of it; see `results`
  compare.csv        one row a run
  compare.svg        medians and quartiles over steps, where matplotlib is installed
  figure.pdf         for a paper, as figure.png and figure.svg too; see `figures`
  grpo/seed-0/       the run directory of one contender and seed
  grpo/seed-1.error.txt     why a run failed

`plot` draws that figure from results anywhere.
"""

from kapelle.comparison.figures import plot

__all__ = ["plot"]
