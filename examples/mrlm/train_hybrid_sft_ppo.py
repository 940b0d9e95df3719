"""Two stages: SFT on demonstrations that are often incorrect, then PPO on rewards from the same weights.

python examples/mrlm/train_hybrid_sft_ppo.py
"""

import sys
import tempfile
from pathlib import Path

import kapelle
from kapelle.algorithms import PPO, SFT
from kapelle.environments import Arithmetic
from kapelle.settings.base import AlgorithmSettings
from kapelle.workflows import Solo

SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}
"""A model that a laptop trains in seconds; replace it with `"Qwen/Qwen3-0.6B"` and change the learning rate."""


def trainer(algorithm: AlgorithmSettings, start_from: dict[str, Path] | None = None) -> kapelle.Trainer:
    """Return the same run with the given algorithm, starting from the weights of another run."""
    return kapelle.Trainer(
        model=SMALL,
        team={"sharing": "shared", "agents": 1, "sampling": {"max_tokens": 4}},
        environment=Arithmetic(digits=1, carry_share=0.5),
        workflow=Solo(),
        algorithm=algorithm,
        optimizer={"lr": 3e-3 if algorithm.name == "sft" else 1e-3},
        training={"tasks_per_step": 24},
        start_from=start_from,
    )


def main(steps: int = 10) -> None:
    """Train on demonstrations, save, and continue with rewards."""
    with tempfile.TemporaryDirectory() as folder:
        with trainer(SFT()) as imitating:
            for step in imitating.steps(6 * steps):
                if step.number % steps == 0:
                    print(f"SFT step {step.number:3d}  NLL {step.metrics['nll/shared']:.2f} nats per token")
            imitating.save_policies(Path(folder))
        with trainer(PPO(), {"shared": Path(folder) / "policies" / "shared"}) as learning:
            for step in learning.steps(steps):
                print(f"PPO step {step.number:3d}  success {step.metrics['success']:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
