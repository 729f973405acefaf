"""5,000 random settings: each is taken, or refused in one line that names its key, before any model is loaded."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from jsonargparse import ArgumentError
from pytorch_lightning import Trainer

from configs.command import config_of, one_line, parser_for
from configs.schema import Config
from data_gen.pipeline import memory
from data_gen.pipeline.command import check_settings
from data_gen.pipeline.sizes import settled
from data_gen.prompts.sets import set_of, sources_of
from decode.experiment import Experiment
from heads.grid import grid

NUM_CASES = 5000
TINY = Path(__file__, "../../../checkpoints/tiny").resolve()
NUMBERS = [0, 1, -1, 2, 3.5, -0.0, 10**20, -(2**70), 1e308, math.nan, math.inf, True, False, None]
TEXTS = ["", " ", "x", "none", "null", "auto", "\0", "../x", "a" * 300, "s3://bucket/run", "1e9", "2x80"]
WRONG = [*NUMBERS, *TEXTS, [], {}, [[]], [None], [1, "a"], [0, 0], {"x": 1}, {"x": None}, {"path": ""}, {"path": 5}]


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
        settled(config.data, config.heads)
    if not config.decode.as_recorded:
        Experiment(config)


def other_value(random_of: random.Random, default: Any) -> Any:
    """A value for a setting: a wrong one, or one near its default."""
    if isinstance(default, bool) or default is None or random_of.random() < 0.7:
        return random_of.choice(WRONG)
    if isinstance(default, int | float):
        return random_of.choice([default * 2, default + 1, -default, default / 3])
    return [default, default] if random_of.random() < 0.5 else random_of.choice([str(default), [default]])


def changed(pair: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    whole = {"pair": json.loads(json.dumps(pair))}
    *sections, last = name.split(".")
    section = whole
    for key in sections:
        section = section.setdefault(key, {})
    section[last] = value
    return whole


@pytest.mark.slow
def test_every_setting_is_taken_or_refused_by_its_name_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    parser, random_of = parser_for(nothing, trainer=Trainer), random.Random(0)
    defaults = parser.get_defaults().as_dict()
    pair = {model: {"path": str(TINY / model)} for model in ("target", "draft")}
    names = [name for name in leaves(defaults) if name not in ("pair", "trainer")]
    outcomes: Counter[str] = Counter()
    failures = {}
    for _ in range(NUM_CASES):
        name = random_of.choice(names)
        default: Any = defaults
        for key in name.split("."):
            default = default[key]
        value = other_value(random_of, None if isinstance(default, dict) else default)
        try:
            config = config_of(parser, parser.parse_string(json.dumps(changed(pair, name, value))))
            refuse_early(config)
            outcomes["taken"] += 1
        except (ValueError, OSError, ArgumentError) as error:
            line = one_line(error) if isinstance(error, ArgumentError) else " ".join(str(error).split())
            outcomes["refused"] += 1
            # the parser looks for a file of this name and does not say for which key
            words = (name, name.rpartition(".")[2], name.rpartition(".")[0] or name, "null byte")
            if not any(word in line for word in words):
                failures[name] = f"{value!r:.60}: does not name it: {line:.200}"
        except Exception as error:
            failures[name] = f"{value!r:.60}: {type(error).__name__}: {error!s:.200}"
    assert not failures, "\n".join(f"{name} = {problem}" for name, problem in sorted(failures.items()))
    assert min(outcomes.values()) > NUM_CASES / 10, outcomes
