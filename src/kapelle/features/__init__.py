"""Optional features of training, one package each; `settings/feature.py` explains how they are found.

Constrained decoding and images are not features: every layer reads them as fields of `Sampling` and `Message`.
"""
