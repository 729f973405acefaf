"""`python -m data_gen tiny`: train the embedded trio anew."""

from data_gen.tiny.recipe import make_trio


def tiny(*, dir: str = "checkpoints/tiny", seed: int = 0, overwrite: bool = False) -> None:
    """Train the embedded trio anew: about 20 minutes on one core.

    Args:
        dir: the folder that gets target, draft and micro.
        seed: of the weights and of the stories.
        overwrite: replace models that are there already.
    """
    make_trio(dir, seed=seed, overwrite=overwrite)
