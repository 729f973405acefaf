"""python -m evaluation COMMAND: record and replay traces, compare policies, tune, measure."""

from configs.front import Commands, run_room

_NAMES = ("bench", "trace", "replay", "evaluate", "judge", "tune", "flags", "costs", "tables", "hierarchy", "theory")
COMMANDS = Commands(**{name: name for name in _NAMES})

if __name__ == "__main__":
    run_room(COMMANDS)
