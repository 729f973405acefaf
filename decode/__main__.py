"""python -m decode COMMAND: generate from one prompt, record and replay traces, tune, measure."""

from configs.command import Command, run
from decode.bench.command import bench
from decode.costs.command import costs
from decode.evaluation.command import evaluate
from decode.evaluation.one_policy import replay
from decode.generate.command import generate
from decode.hierarchies.command import hierarchy
from decode.papers.command import tables
from decode.theory.command import theory
from decode.traces.command import trace
from decode.tuning.command import tune

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
