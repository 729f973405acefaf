"""An experiment in Python: from its YAML, or the name of a shipped one; and back."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import yaml

from configs.schema import Config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Flags = ParamSpec("Flags")
Returned = TypeVar("Returned")


def load_config(experiment: Config | str | PurePath, *, trainer: type | None = None) -> Config:
    """The experiment of a YAML file; `load_config("experiment.yaml")` is what `--config experiment.yaml` reads.

    Args:
        experiment: path of the file, or the name of a shipped experiment, such as tiny; a Config is returned as it is.
        trainer: pytorch_lightning.Trainer, to check the section `trainer` and to make its callbacks and loggers, as
            training needs them; None leaves the section as it is written.

    Raises:
        ValueError: no such file or shipped experiment, no YAML, an unknown setting, or a value beyond its limit.
    """
    if isinstance(experiment, Config):
        return experiment
    if not isinstance(experiment, str | PurePath):
        raise ValueError(
            f"the experiment is of type {type(experiment).__name__}; give a Config, or the path of a YAML file"
        )
    # a program that reads no YAML is spared the import of the parser
    config: Config = import_module("configs.command").experiment_in(str(experiment), trainer=trainer)
    return config


def accepts_yaml(
    command: Callable[Concatenate[Config, Flags], Returned],
) -> Callable[Concatenate[Config | str | PurePath, Flags], Returned]:
    """A command's function that takes the path of a YAML file as well as a Config."""

    @wraps(command)
    def with_config(config: Config | str | PurePath, *args: Flags.args, **flags: Flags.kwargs) -> Returned:
        return command(load_config(config), *args, **flags)

    return with_config


def yaml_of(config: Config) -> str:
    """The YAML of an experiment: every setting that differs from its default."""
    return yaml.safe_dump(_changed(config), sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)


def _changed(section: "DataclassInstance") -> dict[str, object]:
    settings = {}
    for setting in fields(section):
        value = getattr(section, setting.name)
        default = setting.default
        if setting.default_factory is not MISSING:
            default = setting.default_factory()
        if setting.compare and value != default:  # others are no settings, but of a run
            settings[setting.name] = _plain(value)
    return settings


def _plain(value: object) -> object:
    """A value as YAML has it: a record as a mapping, a tuple as a list, a path as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return _changed(value)
    if isinstance(value, PurePath):
        return str(value)
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
