"""What a recipe may say of a cluster."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kapelle.settings.schema import RayConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"rollout": {"cpus": 0}},
        {"trainer": {"gpus": -1}},
        {"rollout_workers": -1},
        {"timeout": 0},
        {"workers": 2},
    ],
)
def test_what_cannot_be_placed_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RayConfig.model_validate(wrong)
