"""The library's mathematics as pure functions over tensors.

Each module covers one topic. In order of dependence, the modules are: `masking` (statistics, segments, aggregation),
`returns`, `policy_losses`, `advantages`, `value_losses`, `divergences`, `preferences`, `shaping`, `mixing`. Docstrings state
shapes, units and the source. Results are computed in float32, or in float64 if the inputs are float64. Functions raise
AssertionError or an error of torch if shapes do not match.
"""
