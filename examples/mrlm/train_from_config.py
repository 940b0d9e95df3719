"""A run from a file: a built-in recipe or your own YAML file, with settings that override it.

python examples/mrlm/train_from_config.py mrlm_ppo training.steps=20
python examples/mrlm/train_from_config.py mine.yaml
"""

import sys

import kapelle


def main(name: str = "mrlm_ppo", *settings: str) -> int:
    """Train according to the recipe, print where its values came from, and return the number of steps."""
    recipe = kapelle.load_recipe(name, settings=settings)
    given = {key: source for key, source in recipe.origin.items() if source != "default"}
    print(f"{recipe.config.name}: {len(given)} of {len(recipe.origin)} settings are not defaults")
    for key, source in given.items():
        if source == "command line":
            print(f"  {key} from the command line")
    with kapelle.Trainer(recipe.config, origin=recipe.origin) as trainer:
        for step in trainer.steps():
            print(f"step {step.number:3d}  success {step.metrics['success']:.2f}")
        return trainer.done


if __name__ == "__main__":
    main(*sys.argv[1:])
