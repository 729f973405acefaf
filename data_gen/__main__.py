"""`python -m data_gen [COMMAND] --config FILE`: make the data; plan, import, stats, tiny."""

from configs.command import run
from data_gen.run import make

COMMANDS = {"make": make}

if __name__ == "__main__":
    run(COMMANDS, default="make")
