"""python -m decode COMMAND: generate from one prompt, record and replay traces, tune, measure."""

from configs.command import Command, run
from decode.generate import generate

COMMANDS: dict[str, Command] = {
    "generate": generate,
}

if __name__ == "__main__":
    run(COMMANDS)
