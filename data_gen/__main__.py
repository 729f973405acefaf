"""`python -m data_gen [COMMAND] --config FILE`: make the data; plan, import, stats, tiny."""

from configs.command import run
from data_gen.run import make

COMMANDS = {"make": make}


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    run(COMMANDS, default="make", argv=argv)


if __name__ == "__main__":
    main()
