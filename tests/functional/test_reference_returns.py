"""Returns, GAE, V-trace and shaped rewards against published and executed numbers of other libraries."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kapelle.functional import advantages, returns, shaping

pytestmark = pytest.mark.data

Case = dict[str, Any]
FOLDER = "reference/returns_vtrace"


def cases(function: str) -> list[Case]:
    data = os.environ.get("KAPELLE_DATA")
    path = Path(data or ".").parent / FOLDER / "cases.json"
    if not data or not path.is_file():
        pytest.skip(f"needs {FOLDER} beside the folder that KAPELLE_DATA names")
    found = [case for case in json.loads(path.read_text())["cases"] if case["fn"] == function]
    assert found, f"{path} holds no case of {function}"
    return found


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Tensor, expected: Any, rtol: float) -> None:
    torch.testing.assert_close(found, tensor(expected).view_as(found), rtol=rtol, atol=rtol)


def test_td_lambda_returns_stop_where_an_episode_ends() -> None:
    for case in cases("discounted_return_td_lambda"):
        reward = tensor([case["rewards"]])
        ended = (tensor([case["terminated"]]) + tensor([case["truncated"]])) > 0
        gamma = case["gamma"] * (~ended).double()
        zeros, ones = torch.zeros_like(reward), torch.ones_like(reward)
        found = returns.lambda_return(
            reward, zeros, ones, torch.zeros(1), gamma=gamma, lam=case["gae_lambda"]
        )
        close(found, case["returns"], 1e-9)


def test_gae_bootstraps_where_truncated_and_not_where_terminated() -> None:
    for case in cases("gae_returns"):
        # Each stretch up to a terminated or truncated step is a row of its own.
        start = 0
        next_value, reward = tensor(case["next_values"]), tensor(case["rewards"])
        value = next_value.roll(1)
        for end, (terminated, truncated) in enumerate(
            zip(case["terminated"], case["truncated"], strict=True), start=1
        ):
            if not (terminated or truncated):
                continue
            bootstrap = next_value[end - 1 : end] * float(truncated)
            found = advantages.gae(
                reward[None, start:end],
                value[None, start:end],
                torch.ones(1, end - start),
                bootstrap,
                gamma=case["gamma"],
                lam=case["gae_lambda"],
            )
            close(found.target_NT[0], case["returns"][start:end], 1e-3)
            start = end
        assert start == len(reward)


def test_gae_with_discounts_that_vary() -> None:
    for case in cases("gae_discounts"):
        value = tensor(case["values_T_plus_1"])
        reward = tensor(case["rewards"])
        found = advantages.gae(
            reward,
            value[:, :-1],
            torch.ones_like(reward),
            value[:, -1],
            gamma=tensor(case["discounts"]),
            lam=case["gae_lambda"],
        )
        close(found.advantage_NT, case["advantages"], case["rtol"])


def test_lambda_returns() -> None:
    for case in cases("lambda_returns"):
        reward, following = tensor(case["rewards"]), tensor(case["next_values"])
        value, ones = following.roll(1, dims=1), torch.ones_like(reward)
        gamma, bootstrap = tensor(case["discounts"]), following[:, -1]
        found = returns.lambda_return(reward, value, ones, bootstrap, gamma=gamma, lam=case["lambda_"])
        close(found, case["out"], case["rtol"])
        whole = returns.lambda_return(reward, value, ones, bootstrap, gamma=gamma, lam=1.0)
        close(whole, case["discounted_returns_bootstrap_last"], case["rtol"])


def test_vtrace() -> None:
    for case in cases("vtrace"):
        reward, value = tensor(case["rewards"]), tensor(case["values"])
        found = advantages.vtrace(
            tensor(case["rhos"]).log(),
            reward,
            value,
            torch.ones_like(reward),
            tensor(case["bootstrap_value"]),
            gamma=tensor(case["discounts"]),
            lam=case["lambda_"],
            clip_rho=case["clip_rho"],
            clip_policy_rho=case["clip_pg_rho"],
        )
        close(found.target_NT - value, case["td_errors"], case["rtol"])
        close(found.advantage_NT, case["pg_advantages"], case["rtol"])


def test_kl_in_the_reward() -> None:
    for case in cases("kl_shaped_reward"):
        logp, reference = tensor(case["logprobs"]), tensor(case["ref_logprobs"])
        found = shaping.kl_in_reward(logp, reference, beta=case["kl_coeff"])
        found[:, -1] += tensor(case["scores"])
        close(found, case["rewards"], 1e-9)
