"""`acceptance-heads COMMAND`: every command of the project, in the order in which a user needs them.

Nothing heavy is imported before a command runs, so help appears at once (`configs.screens`).
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from configs.hints import meant
from configs.schema import Config
from configs.screens import SHELLS, TRAINING, completion_of, screen_of, summary_of
from configs.signatures import announced_imports, command_of

STEPS = ("data", "train", "export", "evaluate", "tune")
"""What `all` runs."""


class Entry(NamedTuple):
    """A command."""

    target: str
    """Its function, as module:function."""
    settings: tuple[str, ...] = ()
    """Dotted names of the settings that its help shows."""


_DATA = ("data.dir", "data.prompts", "data.num_train", "data.num_dev", "data.num_test", "data.max_new_tokens")
_HEADS = ("heads.dir", "heads.timings", "heads.scalars", "heads.depths", "heads.reject_weights", "heads.learning_rate")
_DECODE = ("decode.dir", "decode.heads", "decode.num_dev", "decode.num_test", "decode.max_draft_length")
_TIMES = ("decode.ratios", "decode.t_draft_s", "decode.t_target_s", "decode.stop_share")
_CLOSING = (
    "  COMMAND --help lists the main options, COMMAND --help.all every option; --version prints the version",
    "  --completion bash|zsh prints a completion script: source <(acceptance-heads --completion bash)",
)
COMMANDS: dict[str, Entry] = {
    "init": Entry("evaluation.costs.init:init"),
    "all": Entry("configs.front:all_steps", (*_DATA, "heads.dir", "decode.dir")),
    "plan": Entry("evaluation.costs.plan:plan", ("pair.gpus", *_DATA)),
    "data": Entry("data_gen.pipeline.command:make", (*_DATA, "data.source", "data.features", "data.batch_size")),
    "stats": Entry("data_gen.stats.command:stats", ("data.dir",)),
    "train": Entry("heads.training.command:train", (*_HEADS, "heads.features", "trainer.max_epochs")),
    "export": Entry("heads.command:export", ("heads.dir", "heads.select")),
    "import": Entry("heads.command:import_", ("heads.dir",)),
    "push": Entry("heads.command:push"),
    "inspect": Entry("heads.command:inspect"),
    "generate": Entry("decode.generate.command:generate", ("decode.max_new_tokens", "decode.max_draft_length")),
    "evaluate": Entry("evaluation.report.evaluate:evaluate", (*_DECODE, *_TIMES)),
    "judge": Entry("evaluation.confidence.command:judge", ("data.dir", "heads.dir", "decode.dir", "decode.heads")),
    "tune": Entry("evaluation.report.tune:tune", (*_DECODE, *_TIMES)),
    "flags": Entry("evaluation.flags.command:flags", (*_DECODE, "decode.t_draft_s", "decode.t_target_s")),
    "replay": Entry("evaluation.report.replay:replay_policy", ("decode.dir", *_TIMES)),
    "costs": Entry("evaluation.costs.command:costs", ("decode.max_draft_length", "decode.compile")),
    "bench": Entry("evaluation.bench.command:bench", _DECODE),
    "hierarchy": Entry("evaluation.hierarchies.command:hierarchy", _DECODE),
    "tables": Entry("evaluation.papers.command:paper_tables", _DECODE),
    "theory": Entry("evaluation.theory.command:theory"),
    "trace": Entry("evaluation.traces.recording:trace", _DECODE),
    "check": Entry("data_gen.pipeline.check:check", ("data.dir",)),
    "import-data": Entry("data_gen.official.command:import_", ("data.dir",)),
    "responses": Entry("data_gen.pipeline.reuse:responses", ("data.dir",)),
}


class Commands(Mapping[str, Any]):
    """The commands of `python -m PACKAGE`; a command is imported when it is called."""

    def __init__(self, **names: str) -> None:
        """Args:
        names: the package's name of each command -> its name in COMMANDS.
        """
        self.names = names

    def __getitem__(self, name: str) -> Any:
        return _command(self.names[name])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def run_room(commands: Commands, *, default: str | None = None, argv: list[str] | None = None) -> None:
    """`python -m PACKAGE`: print one-screen help without importing anything heavy, or run a command.

    Args:
        commands: the commands of the package.
        default: the command that runs if none is named.
        argv: the arguments; None: those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv and argv[0] in commands else default
    if argv and argv[0] in ("-h", "--help"):
        print(_listed(commands))
        return
    if {"-h", "--help"} & set(argv) and name is not None:
        print(screen_of(commands.names[name], *COMMANDS[commands.names[name]]))
        return
    from configs.command import run

    run(commands, default=default, argv=argv)


def _listed(commands: Commands) -> str:
    width = max(map(len, commands)) + 2
    lines = [
        f"  {name:<{width}}{_shortest(summary_of(COMMANDS[target].target))}" for name, target in commands.names.items()
    ]
    return "\n".join([*lines, "", "  --help after a command lists its options"])


def _command(name: str) -> Any:
    return command_of(COMMANDS[name].target)


def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` names; exits with 2 and one line on a user's error."""
    try:
        _main(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:  # during imports; a running command handles it in `configs.command.run`
        print("interrupted before the command started", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `| head` closed the pipe; discard what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def _main(argv: list[str] | None) -> None:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "--version":
        print(f"acceptance-heads {version('acceptance-heads')}")
    elif name in ("-h", "--help"):
        print(overview())
    elif name == "--completion":
        print(_completion(rest))
    elif name not in COMMANDS:
        print(f"error: {name!r} is not a command; {meant(name, COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    elif {"-h", "--help"} & set(rest):
        print(screen_of(name, *COMMANDS[name]))
    else:
        _call(name, rest)


def all_steps(config: Config) -> None:
    """Make data, train, export, evaluate and tune, one after the other; finished work is not repeated.

    Args:
        config: the experiment.
    """
    for number, name in enumerate(STEPS, start=1):
        print(f"== {number} of {len(STEPS)}: {name}", flush=True)
        _command(name)(config)


def overview() -> str:
    """Every command with its summary."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{_shortest(summary_of(entry.target))}" for name, entry in COMMANDS.items()]
    usage = "usage: acceptance-heads COMMAND --config FILE [options]"
    return "\n".join([usage, "", *lines, "", *_CLOSING])


def _completion(argv: list[str]) -> str:
    if len(argv) != 1 or argv[0] not in SHELLS:
        value = f"is {' '.join(argv)!r}" if argv else "names no shell"
        print(f"error: --completion {value}; it takes {' or '.join(SHELLS)}", file=sys.stderr)
        raise SystemExit(2)
    return completion_of({name: entry.target for name, entry in COMMANDS.items()}, argv[0])


def _shortest(summary: str) -> str:
    """A summary up to its first semicolon or full stop."""
    return summary.partition(";")[0].partition(". ")[0].rstrip(".")


def _call(name: str, argv: list[str]) -> None:
    from configs.command import refuse_wrong, run

    command, trainer = _command(name), None
    if name in TRAINING:
        refuse_wrong(command, argv)
        with announced_imports():
            trainer = import_module("pytorch_lightning").Trainer
    run({name: command}, default=name, argv=argv, trainer=trainer)
