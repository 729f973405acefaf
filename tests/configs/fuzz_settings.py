"""Random settings, right and wrong, in YAML files and on the command line: each is taken and kept as it was given, or
refused in one line that names it. Run 5,000 with `python -m tests.configs.fuzz_settings 5000 [SEED]`.
"""

import json
import math
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache, reduce
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning import Trainer

from configs import command
from configs.command import arguments_of, one_line, parser_for, takes_config
from configs.front import COMMANDS, TRAINING
from configs.schema import Config
from data_gen.pipeline import memory
from data_gen.pipeline.checks import check_settings
from data_gen.pipeline.stages import settled
from data_gen.prompts.sets import set_of, sources_of
from decode.experiment import Experiment
from evaluation.costs.init import plan
from heads.grid import grid

TINY = Path(__file__, "../../..").resolve() / "checkpoints/tiny"
NUMBERS = [0, 1, -1, 2, 5, 0.5, 3.5, -0.0, 10**20, -(2**70), 1e308, 5e-324, math.nan, math.inf, -math.inf]
TEXTS = [
    "",
    " ",
    "x",
    "none",
    "null",
    "~",
    "auto",
    "\0",
    "../x",
    "a" * 300,
    "s3://bucket/run",
    "1e9",
    "2x80",
    "08",
    "é",
]
TEXTS += [
    "true",
    "yes",
    "0x10",
    "1_000",
    "2024-01-01",
    "*",
    "[1, 2",
    "{",
    "a: b",
    "# x",
    "%",
    "!!int 5",
    "&a",
    "\ud83d",
]
OTHERS = [
    True,
    False,
    None,
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    [0, 0],
    [True],
    {"x": 1},
    {"x": None},
    {"path": 5},
    {"": 1},
]
POOL = [*NUMBERS, *TEXTS, *OTHERS]
UNKNOWN = ["data.num_trian", "pear.target", "data.server.urls", "heads", "dta", "pair.target.path.x", "trainer.epochs"]
LONGEST, SECONDS = 1300, 30
RAW = [
    "",
    "[]",
    "3",
    "- a\n- b\n",
    "pair\n",
    "\t: 1\n",
    "a: &x [*x]\n",
    "---\na: 1\n---\nb: 2\n",
    "pair: !!python/name:os.system\n",
]
RAW += [
    "? [1, 2]\n: 3\n",
    "1: 2\n",
    "null: 3\n",
    "pair: {target: {path: a}, target: {path: b}}\n",
    "a: " + "[" * 600,
    "\ufeffa: 1\n",
]


@dataclass
class Case:
    """Settings of a file and of a command line."""

    file: dict[str, Any] = field(default_factory=dict)
    """Dotted name -> value."""
    overrides: dict[str, Any] = field(default_factory=dict)
    form: str = "block"
    raw: str | bytes | None = None
    command: str = "plan"

    @property
    def settings(self) -> dict[str, Any]:
        """What counts: an override wins."""
        return self.file | self.overrides


@cache
def defaults() -> dict[str, Any]:
    """The experiment without a YAML."""
    return parser_for(nothing).get_defaults().as_dict()


@cache
def names() -> tuple[str, ...]:
    """Every setting and section of the YAML, and the arguments of Lightning's Trainer."""
    known = [name for name in leaves(defaults()) if name not in ("pair", "trainer")]
    return (*known, *(f"trainer.{name}" for name in signature(Trainer).parameters))


def near(default: Any, rng: random.Random) -> Any:
    """A value of the kind of a default."""
    if isinstance(default, bool):
        return rng.random() < 0.5
    if isinstance(default, int | float):
        return type(default)(default * rng.choice([0.5, 1, 2]) + rng.choice([0, 1]))
    if isinstance(default, list | tuple):
        return [near(entry, rng) for entry in default] or [rng.choice(POOL)]
    return default


def drawn(rng: random.Random) -> Case:
    """A random case."""
    case = Case(command=rng.choice([name for name, (command, _) in COMMANDS.items() if takes_config(command)]))
    case.form = rng.choice(["block", "flow", "json", "crlf", "anchors"])
    if rng.random() < 0.06:
        case.raw = rng.choice([*RAW, b"\xff\xfe\x00", b"pair: caf\xe9\n"])
        return case
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(names())
        default = reduce(lambda at, key: at.get(key) if isinstance(at, dict) else None, name.split("."), defaults())
        value = near(default, rng) if rng.random() < 0.35 else rng.choice(POOL)
        if rng.random() < 0.05:
            name = rng.choice(UNKNOWN)
        if any(
            other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in case.settings
        ):
            continue
        # no operating system passes these characters to a program
        is_passed = not is_unwritable(value) and "\\u0000" not in json.dumps(value)
        where = case.overrides if is_passed and rng.random() < 0.4 else case.file
        where[name] = value
        if where is case.overrides and rng.random() < 0.3 and not is_unwritable(value):
            case.file[name] = near(default, rng)  # which the override replaces
    return case


def is_unwritable(value: Any) -> bool:
    """Whether neither a file nor a command line of UTF-8 can hold this value."""
    text = json.dumps(value, ensure_ascii=False)
    return "\ud83d" in text


def text_of(case: Case) -> str:
    """The YAML file of a case."""
    experiment: dict[str, Any] = {"pair": {model: {"path": str(TINY / model)} for model in ("target", "draft")}}
    for name, value in case.file.items():
        *sections, last = name.split(".")
        section = experiment
        for key in sections:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        section[last] = value
    if case.form == "json":
        return json.dumps(experiment)
    text = yaml.safe_dump(experiment, default_flow_style=case.form == "flow", allow_unicode=True, sort_keys=False)
    if case.form == "anchors":
        return text.replace("pair:", "pair: &models", 1)
    return text.replace("\n", "\r\n") if case.form == "crlf" else text


def arguments(case: Case, path: Path, rng: random.Random) -> list[str]:
    """The command line of a case; lists and mappings are JSON, as users write them."""
    argv = ["--config", str(path)]
    for name, value in case.overrides.items():
        text = written(value)
        argv += [f"--{name}={text}"] if rng.random() < 0.5 else [f"--{name}", text]
    return argv


def written(value: Any) -> str:
    """A value on the command line: a text as it is, others as YAML."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").removesuffix("\n")


def with_flags(name: str) -> list[str]:
    """Values of the flags that a command requires."""
    required = {"for_": "vllm", "prompt": "Hi", "policy": "entropy", "paper": "svip"}
    parameters = signature(COMMANDS[name][0]).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.name != "config"]
    return [text for name in needed for text in (f"--{name.rstrip('_')}", required.get(name, "x"))]


def problem_of(case: Case, folder: Path, rng: random.Random) -> tuple[str, str | None]:
    """The outcome (taken, refused) of a case, and what is wrong with it."""
    path = folder / "experiment.yaml"
    if isinstance(case.raw, bytes):
        path.write_bytes(case.raw)
    else:
        path.write_text(text_of(case) if case.raw is None else case.raw, encoding="utf-8", newline="")
    argv = [*arguments(case, path, rng), *with_flags(case.command)]
    try:
        with limited(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            trainer = Trainer if case.command in TRAINING else None
            [config], _ = arguments_of(COMMANDS[case.command][0], argv, trainer=trainer)
            changed = next(lost(case, config, is_made=trainer is not None), None)
            if changed is None:
                refuse_early(config)
                if case.command == "plan":
                    plan(config, sample=0)
    except (ValueError, OSError) as error:
        return "refused", about_line(one_line(error), case)
    except SystemExit as error:
        return "refused", f"SystemExit {error.code}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "failed", f"{type(error).__name__}: {error!s:.300}"
    return "taken", changed


def about_line(line: str, case: Case) -> str | None:
    """What is wrong with a refusal."""
    if not line or len(line) > LONGEST or len(line.splitlines()) > 1:
        return f"no line of at most {LONGEST} characters: {line[:300]!r}"
    if case.raw is not None or "while parsing" in line:  # a line names a position in the file
        return None
    words = {
        word for name in case.settings for word in (name, name.rpartition(".")[2], name.rpartition(".")[0]) if word
    }
    return None if any(word in line for word in words) else f"names no setting: {line[:300]}"


def lost(case: Case, config: Config, *, is_made: bool) -> Iterator[str]:
    """Settings that a config does not have as they were given; `is_made`: Lightning's arguments became objects."""
    values = asdict(config)
    for name, given in case.settings.items():
        if name.startswith("trainer") and is_made:
            continue
        got = reduce(lambda at, key: at.get(key, "nothing") if isinstance(at, dict) else at, name.split("."), values)
        if not is_kept(given, got) and not (name in case.overrides and got == written(given)):  # a setting of text
            yield f"{name} was given as {given!r:.80} and became {got!r:.80}"


def is_kept(given: Any, got: Any) -> bool:
    """Whether a value is the one that was given, up to the types that a YAML cannot write."""
    if isinstance(given, dict) and isinstance(got, dict):
        return all(is_kept(value, got.get(name)) for name, value in given.items())
    if isinstance(given, list | tuple) and isinstance(got, list | tuple):
        return len(given) == len(got) and all(map(is_kept, given, got))
    if isinstance(given, bool) or isinstance(got, bool):
        return given is got or str(given).lower() == str(got).lower() or (given, got) == ("yes", True)
    if isinstance(given, int | float) and isinstance(got, int | float):
        return given == got or (math.isnan(given) and math.isnan(got))
    if isinstance(given, str) and not isinstance(got, str):
        return is_text_of(given, got)
    if isinstance(got, str) and isinstance(given, int | float):
        return got in (str(given), json.dumps(given))  # of a setting that is text
    return bool(given == got)


def is_text_of(text: str, got: object) -> bool:
    """Whether a parser may read this value from the text, as YAML or as a number."""
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    if not isinstance(read, str):
        return is_kept(read, got)
    return isinstance(got, int | float) and float(text) == got


def nothing(config: Config) -> None:
    """A command that takes a config."""


def leaves(values: dict[str, Any], name: str = "") -> list[str]:
    """The dotted names of all settings, and of the sections that hold them."""
    found = []
    for key, value in values.items():
        if key not in ("config", "print_config"):
            found.append(name + key)
            found += leaves(value, f"{name}{key}.") if isinstance(value, dict) else []
    return found


def refuse_early(config: Config) -> None:
    """What the commands check before they load models."""
    check_settings(config.pair, config.data)
    memory.gpus_of(config.pair.gpus)
    grid(config.heads)
    for source in sources_of(config.data).values():
        if source.path != "stories":
            set_of(source)
    if all(source.path == "stories" for source in config.data.prompt_sources):
        settled(config.data)
    if not config.decode.as_recorded:
        Experiment(config)


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError, which is no error of a user, after `SECONDS`."""

    def stop(*_: object) -> None:
        raise RuntimeError(f"it takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(num: int, seed: int, folder: Path) -> tuple[Counter[str], dict[str, str]]:
    """Outcomes of `num` cases, and the cases that are wrong, each with what is wrong."""
    command.parser_for = cache(parser_for)  # which takes most of the time
    rng = random.Random(seed)
    outcomes = Counter[str]()
    failures: dict[str, str] = {}
    for number in range(num):
        case = drawn(rng)
        if any(map(is_unwritable, case.file.values())) and case.form != "json":
            case.form = "json"
        outcome, problem = problem_of(case, folder, rng)
        outcomes[outcome] += 1
        if problem is not None:
            failures[f"{number}: {case}"] = problem
    return outcomes, failures


if __name__ == "__main__":
    num_cases = int(sys.argv[1])
    first_seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as directory:
        counts, wrong = fuzz(num_cases, first_seed, Path(directory))
    for which, what in wrong.items():
        print(f"{what}\n    {which}")
    print(f"{num_cases} settings, seed {first_seed}: {dict(counts)}, {len(wrong)} wrong")
    raise SystemExit(bool(wrong))
