"""`acceptance-heads COMMAND`: every command of the project, in the order in which a user needs them.

Nothing heavy is imported before a command runs, so help appears at once.
"""

import ast
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

from configs.command import ending_in_one_line, fail, refuse_wrong, run
from configs.hints import NothingToExportError, meant
from configs.load import load_config
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
COMMANDS: dict[str, tuple[str, ...]] = {
    "init": ("evaluation.costs.init:init",),
    "all": ("configs.front:all_steps", *_DATA, "heads.dir", "decode.dir"),
    "plan": ("evaluation.costs.init:plan", "pair.gpus", *_DATA),
    "data": ("data_gen.pipeline.command:make", *_DATA, "data.source", "data.features", "data.batch_size"),
    "stats": ("data_gen.stats:stats", "data.dir"),
    "train": ("heads.training.command:train", *_HEADS, "heads.features", "trainer.max_epochs"),
    "export": ("heads.command:export", "heads.dir", "heads.select"),
    "import": ("heads.command:import_", "heads.dir"),
    "push": ("heads.command:push",),
    "inspect": ("heads.command:inspect",),
    "generate": ("decode.generate.command:generate", "decode.max_new_tokens", "decode.max_draft_length"),
    "evaluate": ("evaluation.report.evaluate:evaluate", *_DECODE, *_TIMES),
    "judge": ("papers.confidence.command:judge", "data.dir", "heads.dir", "decode.dir", "decode.heads"),
    "tune": ("evaluation.report.tune:tune", *_DECODE, *_TIMES),
    "flags": ("evaluation.flags.command:flags", *_DECODE, *_GIVEN_TIMES),
    "replay": ("evaluation.report.replay:replay_policy", "decode.dir", *_TIMES),
    "costs": ("evaluation.costs.machine:costs", "decode.max_draft_length"),
    "bench": ("evaluation.bench.command:bench", *_DECODE),
    "hierarchy": ("papers.hierarchies.command:hierarchy", *_DECODE),
    "tables": ("papers.command:paper_tables", *_DECODE),
    "theory": ("papers.theory.command:theory",),
    "trace": ("evaluation.traces.recording:trace", *_DECODE),
    "check": ("data_gen.pipeline.inspect:check", "data.dir"),
    "import-data": ("data_gen.official:import_", "data.dir"),
    "responses": ("data_gen.pipeline.inspect:responses", "data.dir"),
}
"""Name -> its function, as module:function, and the dotted names of the settings that its help shows."""


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
        print(screen_of(name, command_of(name), COMMANDS[name][1:]))
    else:
        command, trainer = command_of(name), None
        if name in TRAINING:
            refuse_wrong(command, rest)
            with _announced_imports(in_logs=True):
                trainer = import_module("pytorch_lightning").Trainer
        run({name: command}, argv=[name, *rest], trainer=trainer)
    sys.stdout.flush()


def all_steps(config: Config | str | PurePath) -> None:
    """Make data, train, export, evaluate and tune, one after the other; finished work is not repeated. If no head may
    be exported, the policies without training are evaluated, and nothing is tuned.

    Other processes of a distributed training end with it. Those that Lightning starts run the same command line from
    its beginning, when the data is complete.
    """
    if not isinstance(config, Config):
        config = load_config(config, trainer=import_module("pytorch_lightning").Trainer)
    steps = ["data", "train", "export", "evaluate", "tune"]
    is_child = os.environ.get("LOCAL_RANK", "0") != "0" and "RANK" not in os.environ  # torchrun sets both
    for number, name in enumerate(steps, start=1):
        if name == "train" or not is_child:
            print(f"== {number} of {len(steps)}: {name}", flush=True)
            try:
                command_of(name)(replace(config, is_step="tune" in steps))  # else `evaluate` prints the verdict
            except NothingToExportError:  # training has printed why
                print("note: no head is worth exporting (export --force does); only policies without training compete")
                steps.remove("tune")
        if name == "train" and import_module("pytorch_lightning.utilities").rank_zero_only.rank > 0:
            return


def _overview() -> Iterator[str]:
    """Commands with their summaries, up to the first semicolon or full stop."""
    width = max(map(len, COMMANDS)) + 2
    for name in COMMANDS:
        summary = summary_of(command_of(name))
        yield f"  {name:<{width}}{summary.partition(';')[0].partition('. ')[0].rstrip('.')}"


@cache
def command_of(name: str) -> Callable[..., Any]:
    """A command with its signature and docstring, which are read from its source; it is imported when it is called.

    Wrong flags are then refused at once. Only the modules that define the types of its flags are imported.
    """
    module, function_name = COMMANDS[name][0].split(":")
    path = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function_name)
    used = {node.id for node in ast.walk(function.args) if isinstance(node, ast.Name)}
    imports = [
        ast.ImportFrom(module=node.module, names=aliases, level=0)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        and (aliases := [alias for alias in node.names if (alias.asname or alias.name) in used])
    ]
    function.body, function.returns, function.decorator_list = function.body[:1], None, []
    names: dict[str, Any] = {"__name__": __name__}  # the parser imports the module that a function names
    # the project's source, as an import would run it
    exec(compile(ast.fix_missing_locations(ast.Module([*imports, function], [])), module, "exec"), names)

    @wraps(names[function_name])
    def command(*args: Any, **flags: Any) -> Any:
        with _announced_imports():
            function = getattr(import_module(module), function_name)
        return function(*args, **flags)

    return command


@contextmanager
def _announced_imports(*, in_logs: bool = False) -> Iterator[None]:
    """Run slow imports with a note on a terminal, and perhaps in logs, and without garbage collection, a seventh of
    their time.
    """
    is_terminal = sys.stderr.isatty()
    if is_terminal or in_logs:
        print("loading torch", end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if is_terminal:
            print("\x1b[2K", end="\r", file=sys.stderr, flush=True)
