"""The library's mathematics as pure functions over tensors.

There is one module per idea, in this order of dependence: `masking` (statistics, segments, aggregation), `returns`,
`policy_losses`, `advantages`, `value_losses`, `divergences`, `preferences`, `shaping`, `mixing`. Each docstring gives shapes,
units and the source. Results are computed in float32, or in float64 if the inputs have that type. Shapes that do not match
raise AssertionError or torch's own error.
"""
