"""`all`: every step with one experiment."""

import sys
from contextlib import nullcontext

import pytest

from configs.front import COMMANDS as FRONT_COMMANDS
from configs.front import all_steps
from configs.hints import NothingToExportError
from configs.schema import Config, ModelSource, PairConfig

STEPS = ("data", "train", "export", "evaluate", "tune")


@pytest.mark.parametrize(("failing", "num_run"), [(None, 5), ("train", 2)])
def test_all_runs_every_step_with_one_experiment_and_stops_at_the_first_that_fails(failing, num_run, monkeypatch):
    steps, config = [], Config(pair=PairConfig(target=ModelSource(path="big"), draft=ModelSource(path="small")))

    def command(name):
        return lambda config, **_: steps.append((name, config.data.dir)) or (sys.exit(7) if name == failing else None)

    for name in STEPS:
        monkeypatch.setitem(FRONT_COMMANDS, name, (command(name), ()))
    with pytest.raises(SystemExit, match="7") if failing else nullcontext():
        all_steps(config)
    assert steps == [(name, "data/run") for name in STEPS[:num_run]]


@pytest.mark.parametrize("resume", [True, False])
def test_all_trains_again_after_prompts_were_added_where_that_is_wanted(resume, monkeypatch):
    """Training refuses to resume on data that has grown, and says to pass --resume false: `all` takes that flag."""
    given = {}

    def command(name):
        return lambda _, **flags: given.setdefault(name, flags)

    for name in STEPS:
        monkeypatch.setitem(FRONT_COMMANDS, name, (command(name), ()))
    config = Config(pair=PairConfig(target=ModelSource(path="big"), draft=ModelSource(path="small")))
    all_steps(config, resume=resume)
    assert {name: flags.get("resume") for name, flags in given.items()} == dict.fromkeys(STEPS) | {"train": resume}


def test_all_evaluates_without_heads_and_ends_with_the_verdict_if_none_may_be_exported(monkeypatch, capsys):
    steps, config = [], Config(pair=PairConfig(target=ModelSource(path="big"), draft=ModelSource(path="small")))

    def command(name):
        def run_step(config: Config, **_: object) -> None:
            steps.append((name, config.is_step))
            if name == "export":
                raise NothingToExportError("no head is better")

        return run_step

    for name in STEPS:
        monkeypatch.setitem(FRONT_COMMANDS, name, (command(name), ()))
    all_steps(config)
    assert steps == [("data", True), ("train", True), ("export", True), ("evaluate", False)]
    assert "note: no head is worth exporting" in capsys.readouterr().out
