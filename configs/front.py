"""`acceptance-heads COMMAND`: every command of the project, in the order in which a user needs them.

Nothing heavy is imported before a command runs, so help appears at once (`configs.screens`).
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from configs.hints import fail, meant
from configs.schema import Config
from configs.screens import SHELLS, TRAINING, announced_imports, command_of, completion_of, screen_of, summary_of

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
_USAGE = "usage: acceptance-heads COMMAND --config FILE [options]"
_CLOSING = (
    "  COMMAND --help lists the main options, COMMAND --help.all every option; --version prints the version",
    "  --completion bash|zsh prints a completion script: source <(acceptance-heads --completion bash)",
)
COMMANDS: dict[str, Entry] = {
    "init": Entry("evaluation.costs.init:init"),
    "all": Entry("configs.front:all_steps", (*_DATA, "heads.dir", "decode.dir")),
    "plan": Entry("evaluation.costs.plan:plan", ("pair.gpus", *_DATA)),
    "data": Entry("data_gen.pipeline.command:make", (*_DATA, "data.source", "data.features", "data.batch_size")),
    "stats": Entry("data_gen.stats:stats", ("data.dir",)),
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
    "check": Entry("data_gen.pipeline.inspect:check", ("data.dir",)),
    "import-data": Entry("data_gen.official:import_", ("data.dir",)),
    "responses": Entry("data_gen.pipeline.inspect:responses", ("data.dir",)),
}


class Commands(Mapping[str, Any]):
    """The commands of `python -m PACKAGE`; a command is imported when it is called."""

    def __init__(self, **names: str) -> None:
        """`names`: the package's name of each command -> its name in COMMANDS."""
        self.names = names

    def __getitem__(self, name: str) -> Any:
        return _command(self.names[name])

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
    name = argv[0] if argv and argv[0] in commands.names else default
    if argv and argv[0] in ("-h", "--help"):
        print("\n".join([*_listed(commands.names), "", "  --help after a command lists its options"]))
    elif {"-h", "--help"} & set(argv) and name is not None:
        print(screen_of(commands.names[name], *COMMANDS[commands.names[name]]))
    else:
        from configs.command import run

        run(commands, default=default, argv=argv)


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
        print("\n".join([_USAGE, "", *_listed({name: name for name in COMMANDS}), "", *_CLOSING]))
    elif name == "--completion" and len(rest) == 1 and rest[0] in SHELLS:
        print(completion_of({name: entry.target for name, entry in COMMANDS.items()}, rest[0]))
    elif name == "--completion":
        fail(f"--completion is {' '.join(rest)!r}; it takes {' or '.join(SHELLS)}")
    elif name not in COMMANDS:
        fail(f"{name!r} is not a command; {meant(name, COMMANDS)}")
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


def _listed(names: Mapping[str, str]) -> list[str]:
    """Commands with their summaries, up to the first semicolon or full stop."""
    summaries = {name: summary_of(COMMANDS[entry].target) for name, entry in names.items()}
    width = max(map(len, names)) + 2
    return [
        f"  {name:<{width}}{text.partition(';')[0].partition('. ')[0].rstrip('.')}" for name, text in summaries.items()
    ]


def _command(name: str) -> Any:
    return command_of(COMMANDS[name].target)


def _call(name: str, argv: list[str]) -> None:
    from configs.command import refuse_wrong, run

    command, trainer = _command(name), None
    if name in TRAINING:
        refuse_wrong(command, argv)
        with announced_imports():
            trainer = import_module("pytorch_lightning").Trainer
    run({name: command}, default=name, argv=argv, trainer=trainer)
