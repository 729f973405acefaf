"""`python -m data_gen [COMMAND] --config FILE`: make the data; plan, import, responses, stats, tiny."""

from configs.command import Command, run
from data_gen.official.command import import_
from data_gen.pipeline.command import make
from data_gen.pipeline.plan import plan
from data_gen.pipeline.reuse import responses
from data_gen.stats.command import stats
from data_gen.tiny.command import tiny

COMMANDS: dict[str, Command] = {
    "make": make,
    "plan": plan,
    "import": import_,
    "responses": responses,
    "stats": stats,
    "tiny": tiny,
}


def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` names, or make."""
    run(COMMANDS, default="make", argv=argv)


if __name__ == "__main__":
    main()
