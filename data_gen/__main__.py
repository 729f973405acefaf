"""`python -m data_gen [COMMAND] --config FILE`: make the data; plan, import, stats, tiny."""

from configs.command import Command, run
from data_gen.official.command import import_
from data_gen.pipeline.command import make
from data_gen.pipeline.plan import plan
from data_gen.stats.command import stats


def tiny(*, dir: str = "checkpoints/tiny", seed: int = 0, overwrite: bool = False) -> None:
    """Train the embedded trio anew: about 20 minutes on one core.

    Args:
        dir: where target, draft and micro go.
        seed: of the weights and of the stories.
        overwrite: replace models that are there already.
    """
    from data_gen.tiny.recipe import make_trio

    make_trio(dir, seed=seed, overwrite=overwrite)


COMMANDS: dict[str, Command] = {"make": make, "plan": plan, "import": import_, "stats": stats, "tiny": tiny}


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    run(COMMANDS, default="make", argv=argv)


if __name__ == "__main__":
    main()
