"""`acceptance-heads COMMAND`: every command of the project, in the order in which a user needs them.

Nothing heavy is imported before a command runs, so help appears at once.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version

from configs import making, measuring
from configs.command import Command, ending_in_one_line, fail, refuse_wrong, run
from configs.hints import NothingToExportError, meant
from configs.load import load_config
from configs.running import Experiment, announced_imports
from configs.schema import Config
from configs.screens import screen_of, summary_of

TRAINING = ("train", "all")
"""Commands whose `trainer` section is checked against pytorch_lightning.Trainer."""


_DATA = ("data.dir", "data.prompts", "data.num_train", "data.num_dev", "data.num_test", "data.max_new_tokens")
_HEADS = ("heads.dir", "heads.timings", "heads.scalars", "heads.depths", "heads.reject_weights", "heads.learning_rate")
_DECODE = ("decode.dir", "decode.heads", "decode.num_dev", "decode.num_test", "decode.max_draft_length")
_GIVEN_TIMES = ("decode.t_draft_s", "decode.t_target_s", "decode.t_target_ms")
_TIMES = ("decode.ratios", *_GIVEN_TIMES, "decode.stop_share")
_USAGE = "usage: acceptance-heads COMMAND --config FILE [options]"
_CLOSING = "  COMMAND --help lists the main options, COMMAND --help.all every option; --version prints the version"


def all_steps(config: Experiment, *, resume: bool = True) -> None:
    """Make data, train, export, evaluate and tune, one after the other; finished work is not repeated. If no head may
    be exported, the policies without training are evaluated, and nothing is tuned.

    Other processes of a distributed training end with it. Those that Lightning starts run the same command line from
    its beginning, when the data is complete.

    Args:
        resume: false trains from the first step again, as after prompts were added; data and traces stay.
    """
    if not isinstance(config, Config):
        config = load_config(config, trainer=import_module("pytorch_lightning").Trainer)
    steps = ["data", "train", "export", "evaluate", "tune"]
    result: object = None
    flags: dict[str, dict[str, object]] = {"train": {"resume": resume}}
    is_child = os.environ.get("LOCAL_RANK", "0") != "0" and "RANK" not in os.environ  # torchrun sets both
    for number, name in enumerate(steps, start=1):
        if name == "train" or not is_child:
            print(f"== {number} of {len(steps)}: {name}", flush=True)
            try:  # without tuning, `evaluate` prints the verdict
                result = COMMANDS[name][0](replace(config, is_step="tune" in steps), **flags.get(name, {}))
                flags["tune"] = {"evaluation": result}  # so that the trace is replayed once
            except NothingToExportError:  # training has printed why
                print("note: no head is worth exporting (export --force does); only policies without training compete")
                steps.remove("tune")
        if name == "train" and import_module("pytorch_lightning.utilities").rank_zero_only.rank > 0:
            return


COMMANDS: dict[str, tuple[Command, tuple[str, ...]]] = {
    "init": (making.init, ()),
    "all": (all_steps, (*_DATA, "heads.dir", "decode.dir")),
    "plan": (making.plan, ("pair.gpus", *_DATA)),
    "data": (making.make_data, (*_DATA, "data.source", "data.batch_size")),
    "stats": (making.stats, ("data.dir",)),
    "train": (making.train, (*_HEADS, "heads.states", "trainer.max_epochs")),
    "export": (making.export, ("heads.dir", "heads.select")),
    "import": (making.import_head, ("heads.dir",)),
    "push": (making.push, ()),
    "inspect": (making.inspect, ()),
    "generate": (making.generate, ("decode.max_new_tokens", "decode.max_draft_length")),
    "evaluate": (measuring.evaluate, (*_DECODE, *_TIMES)),
    "judge": (measuring.judge, ("data.dir", "heads.dir", "decode.dir", "decode.heads")),
    "tune": (measuring.tune, (*_DECODE, *_TIMES)),
    "flags": (measuring.flags, (*_DECODE, *_GIVEN_TIMES)),
    "replay": (measuring.replay, ("decode.dir", *_TIMES)),
    "costs": (measuring.costs, ("decode.max_draft_length",)),
    "bench": (measuring.bench, _DECODE),
    "hierarchy": (measuring.hierarchy, _DECODE),
    "tables": (measuring.tables, _DECODE),
    "theory": (measuring.theory, ()),
    "trace": (measuring.trace, _DECODE),
    "check": (making.check, ("data.dir",)),
    "import-data": (making.import_data, ("data.dir",)),
    "responses": (making.responses, ("data.dir",)),
}
"""Name -> its function, and the dotted names of the settings that its help shows; in the order of use."""


@ending_in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` names; exits with 2 and one line on a user's error."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "--version":
        print(f"acceptance-heads {version('acceptance-heads')}")
    elif name in ("-h", "--help"):
        print("\n".join([_USAGE, "", *_overview(), "", _CLOSING]))
    elif name not in COMMANDS:
        fail(f"{name!r} is not a command; {meant(name, COMMANDS)}")
    elif {"-h", "--help"} & set(rest):
        command, settings = COMMANDS[name]
        print(screen_of(name, command, settings))
    else:
        command, _ = COMMANDS[name]
        trainer = None
        if name in TRAINING:
            refuse_wrong(command, rest)
            with announced_imports(in_logs=True):
                trainer = import_module("pytorch_lightning").Trainer
        run({name: command}, argv=[name, *rest], trainer=trainer)
    sys.stdout.flush()


def _overview() -> Iterator[str]:
    """Commands with their summaries, up to the first semicolon or full stop."""
    width = max(map(len, COMMANDS)) + 2
    for name, (command, _) in COMMANDS.items():
        summary = summary_of(command)
        yield f"  {name:<{width}}{summary.partition(';')[0].partition('. ')[0].rstrip('.')}"
