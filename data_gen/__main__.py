"""`python -m data_gen [COMMAND] --config FILE`: make the data; init, plan, check, import, responses, stats."""

import gc


def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` names, or make."""
    gc.disable()  # a seventh of the start-up looked for garbage among what was just imported, and all of that stays
    from configs.command import Command, run
    from data_gen.official.command import import_
    from data_gen.pipeline.check import check
    from data_gen.pipeline.command import make
    from data_gen.pipeline.init import init
    from data_gen.pipeline.plan import plan
    from data_gen.pipeline.reuse import responses
    from data_gen.stats.command import stats

    gc.freeze()
    gc.enable()
    commands: dict[str, Command] = {
        "make": make,
        "init": init,
        "plan": plan,
        "check": check,
        "import": import_,
        "responses": responses,
        "stats": stats,
    }
    run(commands, default="make", argv=argv)


if __name__ == "__main__":
    main()
