"""python -m decode COMMAND: generate from one prompt, record and replay traces, tune, measure."""

from configs.command import Command, run
from decode.bench.command import bench
from decode.costs import costs
from decode.evaluate import evaluate
from decode.generate import generate
from decode.hierarchies.command import hierarchy
from decode.paper_tables import tables
from decode.record import trace
from decode.replay_report import replay
from decode.theory.report import theory
from decode.tune import tune

COMMANDS: dict[str, Command] = {
    "generate": generate,
    "bench": bench,
    "trace": trace,
    "replay": replay,
    "evaluate": evaluate,
    "tune": tune,
    "costs": costs,
    "tables": tables,
    "hierarchy": hierarchy,
    "theory": theory,
}

if __name__ == "__main__":
    run(COMMANDS)
