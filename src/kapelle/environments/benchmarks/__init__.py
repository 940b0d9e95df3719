"""Published benchmarks by name: their prompts, parsers and scores, for `kapelle eval --benchmark NAME`.

`definitions` contains one entry for each benchmark, and `environment` makes each entry an environment with only a test split.
"""
