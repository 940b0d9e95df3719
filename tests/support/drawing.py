"""A module that draws from the generators of the whole process while it is imported, as some libraries do."""

from __future__ import annotations

import random

import numpy as np
import torch

DRAWN = random.random(), np.random.random(), torch.rand(()).item()
