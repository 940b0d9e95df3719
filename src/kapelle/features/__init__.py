"""Optional features of training, with one package for each feature; `settings/feature.py` explains how they are found.

Constrained decoding and images are not features: all parts of the library read them as fields of `Sampling` and `Message`.
"""
