"""`python -m heads export | import | push | inspect`."""

from configs.front import Commands, run_room

COMMANDS = Commands(**{name: name for name in ("export", "import", "push", "inspect")})

if __name__ == "__main__":
    run_room(COMMANDS)
