"""Algorithms compared on one recipe: the same tasks, the same number of episodes, several seeds.

<folder>/
  compare.json       what was asked and what came of it; see `results`
  compare.csv        one row a run
  compare.svg        curves over steps, where matplotlib is installed
  grpo/seed-0/       the run directory of one contender and seed
  grpo/seed-1.error.txt     why a run failed
"""
