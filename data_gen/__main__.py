"""`python -m data_gen [COMMAND] --config FILE`: the commands of this package; make is the default."""

from configs.front import Commands, run_room

COMMANDS = Commands(
    make="data",
    init="init",
    plan="plan",
    check="check",
    responses="responses",
    stats="stats",
    **{"import": "import-data"},
)


def main(argv: list[str] | None = None) -> None:
    run_room(COMMANDS, default="make", argv=argv)


if __name__ == "__main__":
    main()
