"""`python -m checkpoints.recipes`: train the embedded models anew (target, draft, micro, and the feature drafts of the
target). `python -m checkpoints.recipes smollm2`: make a directory of a published model without a hub. `… eagle3`: teach
an EAGLE-3 draft for a model of yours.
"""

import json
from pathlib import Path
from typing import Literal

from checkpoints.recipes.readings import read_target, texts_of
from checkpoints.recipes.recipe import make_feature_drafts, make_trio
from checkpoints.recipes.reduced import ReducedRecipe, teach_reduced
from checkpoints.recipes.smollm2 import smollm2
from configs.command import run
from configs.paths import local_path
from configs.schema import ModelSource
from lm import load_model
from store.shards import write_atomic


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


def eagle3(
    *,
    target: str,
    responses: str,
    out: str,
    vocab_size: int = ReducedRecipe.vocab_size,
    num_epochs: int = ReducedRecipe.num_epochs,
    learning_rate: float = ReducedRecipe.learning_rate,
) -> None:
    """Teach an EAGLE-3 draft with a reduced vocabulary on responses of a target, which is read once; resumes.

    Args:
        target: directory of the target.
        responses: the target's own responses, a file of `acceptance-heads responses`.
        out: the folder that gets the draft; readings and checkpoint go beside it, into OUT-readings.
        vocab_size: tokens that the draft can say; the target's likeliest.
        num_epochs: times that the readings are learned from.
        learning_rate: the peak.
    """
    directory, model = Path(local_path(out, "--out")), load_model(ModelSource(path=target))
    num_layers = model.config.get_text_config().num_hidden_layers
    layer_ids, kept = (2, num_layers // 2, num_layers - 3), directory.with_name(f"{directory.name}-readings")
    texts = texts_of(Path(local_path(responses, "--responses")))
    paths = read_target(model, texts, kept, layer_ids=layer_ids)
    recipe = ReducedRecipe(vocab_size=vocab_size, num_epochs=num_epochs, learning_rate=learning_rate)
    reduced, figures = teach_reduced(model.float(), paths, kept, layer_ids=layer_ids, recipe=recipe)
    reduced.save(directory)
    write_atomic(directory / "figures.json", json.dumps(figures, indent=1).encode())
    rates = ", ".join(f"{rate:.3f}" for rate in figures["acceptance_rates"])
    print(f"{directory}: acceptance_rate at depths 1 to {len(figures['acceptance_rates'])} on held-out texts: {rates}")


if __name__ == "__main__":
    run({"tiny": tiny, "smollm2": smollm2, "eagle3": eagle3}, default="tiny")
