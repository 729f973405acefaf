"""`python -m data_gen [COMMAND] --config FILE`: make the data; init, plan, check, import, responses, stats."""

import gc
import sys

from configs.front import Commands, run_room

_DEFAULT = "make"
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
    """Run the command that `argv` names, or make."""
    asked = sys.argv[1:] if argv is None else argv
    if not {"-h", "--help"} & set(asked):
        gc.disable()  # a seventh of the start-up looked for garbage among what was just imported, and all of that stays
        COMMANDS[asked[0] if asked and asked[0] in COMMANDS else _DEFAULT]
        gc.freeze()
        gc.enable()
    run_room(COMMANDS, default=_DEFAULT, argv=asked)


if __name__ == "__main__":
    main()
