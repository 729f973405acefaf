"""python -m decode generate: one prompt through the speculative loop (`python -m evaluation` measures)."""

from configs.front import Commands, run_room

COMMANDS = Commands(generate="generate")

if __name__ == "__main__":
    run_room(COMMANDS)
