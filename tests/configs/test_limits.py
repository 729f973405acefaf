"""Settings beyond their limits: every number of the YAML has one, and each is refused in one line before a command
begins.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from configs.command import run
from configs.limits import LIMITS, check_limits
from configs.schema import Config, ModelSource, PairConfig, PromptSource

PAIR = PairConfig(target=ModelSource(path="big"), draft=ModelSource(path="small"), micro=ModelSource(path="tiny"))


def changed(section: Any, name: str, value: Any) -> Any:
    """A section in which the entry at a dotted name has another value."""
    first, _, rest = name.partition(".")
    if isinstance(section, dict):
        return {**section, first: value}
    if isinstance(section, str):
        section = (PromptSource(path="stories"), PromptSource(path=section))
    if isinstance(section, tuple):
        return *section[:-1], changed(section[-1], name, value)
    return replace(section, **{first: changed(getattr(section, first), rest, value) if rest else value})


def numbers(section: type, name: str = "") -> list[str]:
    """Dotted names of every field of a section that holds numbers."""
    found = []
    for field in fields(section):
        hint = get_type_hints(section)[field.name]
        kinds = {hint, *get_args(hint), *(part for kind in get_args(hint) for part in get_args(kind))}
        inner = next((kind for kind in kinds if is_dataclass(kind)), None)
        if inner:
            found += numbers(inner, f"{name}{field.name}.")
        elif kinds & {int, float} and "str | int" not in str(hint):
            found.append(name + field.name)
    return found


@pytest.mark.parametrize("value", [-3, float("nan"), float("inf")])
def test_every_number_of_the_schema_has_a_limit_that_refuses_what_no_setting_takes(value: float):
    assert set(numbers(Config)) <= set(LIMITS)
    for name in LIMITS:
        config = changed(Config(pair=PAIR), name, (40, value, 2) if name == "data.split_weights" else value)
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be a number, "):
            check_limits(config)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("heads.batch_size", 0, "heads.batch_size is 0; it must be a number, at least 1"),
        ("heads.depths", (0, -1), "heads.depths is -1"),
        ("data.mixing_ratio", 1.5, "data.mixing_ratio is 1.5; it must be a number, at least 0 and at most 1"),
        ("trainer.accumulate_grad_batches", 0, "trainer.accumulate_grad_batches is 0"),
        ("trainer.limit_test_batches", 0, "trainer.limit_test_batches is 0; it must be a number, greater than 0"),
        ("trainer.devices", 999, "trainer.devices is 999 and this machine has"),
        ("trainer.devices", "0", "trainer.devices is 0"),
        ("trainer.max_epochs", 0, "trainer.max_epochs is 0"),
        ("data.server.url", "localhost:8000", "it must begin with http"),
        ("pair.target.path", "", "pair.target.path is empty"),
        ("data.dir", " ", "name a directory"),
        *(
            (f"{section}.dir", __file__ + "/run", f"{section}.dir is .* is a file")
            for section in ("data", "heads", "decode")
        ),
    ],
)
def test_a_setting_beyond_its_limit_is_named_with_value_and_limit(name: str, value: object, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        check_limits(changed(Config(pair=PAIR), name, value))


@pytest.mark.parametrize("line", ["heads: null", "trainer: null", "pair: {sampling: 1}", "data: {server: {url: null}}"])
@pytest.mark.parametrize("more", ["", "decode: {dir: null, datasets: null, heads: null}", "data: {prompts: null}"])
def test_a_section_or_setting_that_a_yaml_leaves_empty_is_refused_in_one_line(line, more, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(f"{line}\n{more}\n")
    with pytest.raises(SystemExit, match="2"):
        run({"show": lambda config: 1 / 0}, argv=["show", "--config", "tiny", "--config", str(tmp_path / "mine.yaml")])
    [said] = capsys.readouterr().err.splitlines()
    assert "give it" in said


def test_the_command_line_checks_limits_before_the_command_begins(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        run({"show": lambda config: 1 / 0}, argv=["show", "--config", "tiny", "--heads.batch_size", "0"])
    limit = "it must be a number, at least 1 and at most 1,000,000,000"
    assert capsys.readouterr().err == f"error: heads.batch_size is 0; {limit}\n"


def test_defaults_and_a_run_limited_by_steps_are_within_the_limits():
    check_limits(Config(pair=replace(PAIR, micro=None)))
    trainer = {"max_epochs": -1, "max_steps": 10, "devices": "auto", "limit_val_batches": 1.0}
    check_limits(Config(pair=PAIR, trainer=trainer))
