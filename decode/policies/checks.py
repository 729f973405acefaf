"""Checks of a policy's parameters, made when the policy is made; each takes a number or an array of numbers."""

from dataclasses import Field, fields
from typing import Any

import numpy as np


def check_kinds(policy: Any) -> None:
    """Raise unless every parameter is of the kind of its default: numbers, truth values, or an array of either."""
    for parameter in fields(policy):
        _check_kind(parameter, getattr(policy, parameter.name))


def _check_kind(parameter: Field[Any], value: Any) -> None:
    default, annotation = parameter.default, str(parameter.type)
    if value is default or (value is None and "None" in annotation):
        return
    if "bool" in annotation or isinstance(default, bool):
        kinds, expected = "b", "true or false"
    elif isinstance(default, int | float):
        kinds, expected = "iuf", "a number"
    else:
        return
    values = np.asarray(value)
    if values.dtype.kind not in kinds or np.any(values != values):
        raise ValueError(f"{parameter.name} is {value!r}; it must be {expected}")


def check_unit(name: str, value: Any) -> None:
    """Raise unless every value lies in [0, 1]."""
    if not np.all((np.asarray(value) >= 0) & (np.asarray(value) <= 1)):
        raise ValueError(f"{name} is {value}; a probability lies in [0, 1]")


def check_at_least_zero(name: str, value: Any) -> None:
    """Raise if any value is negative."""
    if np.any(np.asarray(value) < 0):
        raise ValueError(f"{name} is {value}; it must be at least 0")


def check_count(name: str, value: Any, minimum: int) -> None:
    """Raise unless every value is a whole number of at least `minimum`."""
    numbers = np.asarray(value)
    if not np.all((numbers >= minimum) & (numbers == np.floor(numbers)) & np.isfinite(numbers)):
        raise ValueError(f"{name} is {value}; it must be a whole number of at least {minimum}")
