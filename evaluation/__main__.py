"""python -m evaluation COMMAND: record and replay traces, compare policies, tune, measure."""

from configs.command import Command, run
from evaluation.bench.command import bench
from evaluation.costs.command import costs
from evaluation.hierarchies.command import hierarchy
from evaluation.papers.command import paper_tables
from evaluation.report.command import evaluate
from evaluation.report.one_policy import replay_policy
from evaluation.theory.command import theory
from evaluation.traces.command import trace
from evaluation.tuning.command import tune

COMMANDS: dict[str, Command] = {
    "bench": bench,
    "trace": trace,
    "replay": replay_policy,
    "evaluate": evaluate,
    "tune": tune,
    "costs": costs,
    "tables": paper_tables,
    "hierarchy": hierarchy,
    "theory": theory,
}

if __name__ == "__main__":
    run(COMMANDS)
