"""python -m decode generate: one prompt through the speculative loop (`python -m evaluation` measures)."""

from configs.command import Command, run
from decode.generate.command import generate

COMMANDS: dict[str, Command] = {"generate": generate}

if __name__ == "__main__":
    run(COMMANDS)
