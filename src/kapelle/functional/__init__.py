"""The library's mathematics as pure functions over tensors.

One module per idea, in this order of dependence: `masking` (statistics, segments, aggregation),
`returns`, `policy_losses`, `advantages`, `value_losses`, `divergences`, `preferences`, `shaping`,
`mixing`. Each function's docstring gives shapes, units and source. Tensors are computed in float32,
or in float64 where they are given so. Shapes that do not fit are a caller's defect: AssertionError or
torch's own error, instead of a silent broadcast.
"""
