"""Policies by name, as a YAML's grid and the command line write them.

entropy                                     the policy with its official default
entropy:max_sqrt_entropy=0.4,scale=0.15     the same with parameters
head:PATH,max_rejection_prob=0.5            the head policy; PATH is an exported head, a directory or a hub id; without
                                            a threshold the one that `evaluation tune` wrote into its config.json
auto:PATH                                   the rule that needs no threshold (law 4.11), as
                                            head:PATH,max_rejection_prob=auto
auto_token_prob:slope=0.9,offset=0.1,…      the same rule without a head, on calibrated q(y); `acceptance-heads
                                            evaluate` finds its numbers and writes them into the verdict
my_module:Unsure:floor=0.2                  a custom policy: the class of a module, perhaps in the current directory

Of the values, 0.4 is a float, 5 an int and true a bool; names, paths of heads and everything else are strings.

A new built-in policy needs its class, its name in `__all__` (`decode.policies` exports the same names) and its
line in POLICIES; an engine's rule needs its class in `decode.policies.engines` and its line in RULES.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from configs.hints import meant
from decode.policies.auto import AutoTokenProb
from decode.policies.base import Policy
from decode.policies.engines import Assisted, DSparkConfidence, LlamaCpp
from decode.policies.head import AUTO, HeadPolicy, head_policy
from decode.policies.plain import (
    AdaEDL,
    CumulativeTokenProb,
    Entropy,
    FixedLength,
    Heuristic,
    MaxProb,
    SelfVerify,
    TokenProb,
)
from heads.model.head import AcceptanceHead

__all__ = ["AdaEDL", "Assisted", "AutoTokenProb", "CumulativeTokenProb", "DSparkConfidence", "Entropy", "FixedLength"]
__all__ += ["HeadPolicy", "Heuristic", "LlamaCpp", "MaxProb", "SelfVerify", "TokenProb", "head_policy"]


class Registered(NamedTuple):
    """An entry of the registry."""

    kind: type[Policy]
    label: str
    """Name in tables."""
    values: Callable[[int], Mapping[str, Sequence[Any]]]
    """Settings that evaluations compare, from the maximum draft length: parameter -> values."""


def lengths_within(longest: int) -> tuple[int, ...]:
    """Draft lengths to choose from: those of `_LENGTHS` below the longest, and the longest."""
    return (*(length for length in _LENGTHS if length < longest), longest)


def _spaced(first: float, last: float, num: int) -> tuple[float, ...]:
    return tuple(round(value, 3) for value in np.linspace(first, last, num).tolist())


UNIT = _spaced(0.025, 0.975, 39)
LOGISTIC = tuple(round(float(value), 4) for value in 1 / (1 + np.exp(-np.linspace(-5, 5, 41))))
"""Thresholds of a probability, denser towards both ends."""

AUTO_TOKEN_PROB = "auto_token_prob"
SOLVED = ("head", AUTO_TOKEN_PROB)
"""Policies that need more than their defaults: a head, or numbers that are solved for on dev at given times."""
POLICIES: dict[str, Registered] = {
    "fixed_length": Registered(FixedLength, "best fixed length", lambda longest: {"k": range(longest + 1)}),
    "heuristic": Registered(Heuristic, "heuristic", lambda longest: {"k": range(1, min(10, longest) + 1)}),
    "token_prob": Registered(TokenProb, "token probability", lambda _: {"min_token_prob": UNIT}),
    "cumulative_token_prob": Registered(
        CumulativeTokenProb, "product of token probabilities", lambda _: {"min_token_prob": LOGISTIC}
    ),
    "max_prob": Registered(MaxProb, "largest probability", lambda _: {"min_max_prob": UNIT}),
    "entropy": Registered(Entropy, "entropy (SVIP)", lambda _: {"max_sqrt_entropy": _spaced(0.02, 1.0, 50)}),
    "self_verify": Registered(SelfVerify, "self-verify (HSDDW)", lambda _: {"initial": (0.0, 1.0, 2.0, 4.0)}),
    "ada_edl": Registered(
        AdaEDL, "AdaEDL", lambda _: {"initial_lambda": _spaced(0.0, 0.9, 19), "target_rate": (0.5, 0.7, 0.9)}
    ),
    AUTO_TOKEN_PROB: Registered(AutoTokenProb, "auto on calibrated q(y)", lambda _: {}),
    "head": Registered(HeadPolicy, "head", lambda _: {"max_rejection_prob": LOGISTIC}),
}
"""All policies, in the order of tables."""
COARSE = (0.0, *_spaced(0.05, 0.95, 19))
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32)
_EITHER = (False, True)
RULES: dict[str, Registered] = {
    "llama_cpp": Registered(
        LlamaCpp, "llama.cpp's rule", lambda longest: {"n_max": lengths_within(longest), "p_min": COARSE}
    ),
    "assisted": Registered(
        Assisted,
        "transformers' rule",
        lambda longest: {
            "num_assistant_tokens": lengths_within(longest),
            "assistant_confidence_threshold": COARSE,
            "is_heuristic": _EITHER,
        },
    ),
    "dspark": Registered(
        DSparkConfidence, "DSpark's confidence", lambda _: {"min_confidence": (0.0, *LOGISTIC), "is_product": _EITHER}
    ),
}
"""Engines' rules, which are compared only where they are named."""
# module:Class, optionally with parameters
_IMPORTED = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)(?::(.*))?", re.DOTALL)


def registered(name: str) -> Registered:
    """The entry of a policy or rule; module:Class is imported and added to POLICIES. ValueError if there is none."""
    if name in RULES:
        return RULES[name]
    if name not in POLICIES:
        written = _IMPORTED.fullmatch(name)
        if written is None:
            known = [*POLICIES, *RULES, AUTO, "or a custom one as module:Class"]
            raise ValueError(f"there is no policy {name!r}; {meant(name, known)}")
        kind = _imported(written[1], written[2])
        POLICIES[name] = Registered(kind, f"{written[2]} ({written[1]})", lambda _: kind.grid)
    return POLICIES[name]


def _imported(module: str, name: str) -> type[Policy]:
    """The policy class of a module; the current directory is searched last, so that it hides no module of ours."""
    if (directory := os.getcwd()) not in sys.path:
        sys.path.append(directory)
    try:
        loaded = import_module(module)
    except ImportError as error:
        raise ValueError(
            f"policy {module}:{name} cannot be imported from {directory} or the installed packages: {error}; built-in "
            f"ones are {', '.join([*POLICIES, *RULES])}"
        ) from error
    kinds = {key: value for key, value in vars(loaded).items() if isinstance(value, type) and issubclass(value, Policy)}
    if name not in kinds or kinds[name] is Policy:
        own = [key for key, kind in kinds.items() if kind.__module__ == module]
        raise ValueError(
            f"{module}:{name} is no policy (a subclass of decode.Policy, see docs/extending.md); {loaded.__file__} has "
            f"{', '.join(own) or 'none'}"
        )
    if "__dataclass_fields__" not in vars(kinds[name]):
        raise ValueError(f"{module}:{name} is no dataclass; put @dataclass(frozen=True) above the class")
    return kinds[name]


def policy_of(
    name: str,
    parameters: Mapping[str, Any],
    load_head: Callable[[str], AcceptanceHead] = AcceptanceHead.from_pretrained,
) -> Policy:
    """The policy of a name and parameters; a head is an object or a path.

    Raises:
        ValueError: an unknown name or parameter, a value out of range, the head policy without a head.
        FileNotFoundError: no exported head at the path.
    """
    kind = registered(name).kind
    assert is_dataclass(kind), "the fields of a policy are its parameters"
    known = [f.name for f in fields(kind)]
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(f"policy {name} has no parameter {parameter!r}; it has {', '.join(known) or 'none'}")
    if name == "head" and "head" not in parameters:
        raise ValueError("policy head needs an exported head: head:PATH,max_rejection_prob=0.5")
    if name == AUTO_TOKEN_PROB and not {"t_draft_s", "t_target_s"} <= parameters.keys():
        raise ValueError(
            f"policy {name} needs numbers that `acceptance-heads evaluate` finds on dev; take the policy in "
            "verdict.json, or give slope, offset, t_draft_s and t_target_s"
        )
    loaded = dict(parameters)
    if isinstance(head := loaded.get("head"), str):
        loaded["head"] = load_head(head)
    if name == "head" and not {"max_rejection_prob", "is_calibrated"} & loaded.keys():
        recommended = loaded["head"].provenance.recommended
        loaded |= {key: recommended[key] for key in ("max_rejection_prob", "is_calibrated") if key in recommended}
    try:
        return head_policy(**loaded) if name == "head" else kind(**loaded)
    except TypeError as error:
        raise ValueError(f"policy {name} cannot take {parameters}: {error}") from error


def parse_policy(spec: str, *, load_head: Callable[[str], AcceptanceHead] = AcceptanceHead.from_pretrained) -> Policy:
    """The policy of a spec, such as those in this module's docstring."""
    return policy_of(*read_spec(spec), load_head)


def read_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """(name, given parameters); ValueError for a part that is not parameter=value."""
    name, _, rest = spec.partition(":")
    written = _IMPORTED.fullmatch(spec.strip())
    if written and name not in (*POLICIES, AUTO):
        name = f"{written[1]}:{written[2]}"
        rest = written[3] or ""
    parameters: dict[str, str | float] = {}
    if name == AUTO:
        name = "head"
        parameters["max_rejection_prob"] = AUTO
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals and name == "head" and "head" not in parameters:
            key = "head"
            value = part
        elif not equals:
            raise ValueError(f"policy {spec!r}: {part!r} must be parameter=value")
        key = key.strip()
        if key in parameters:
            raise ValueError(f"policy {spec!r} gives {key} twice; give it once")
        parameters[key] = value.strip() if key == "head" else _value(value.strip())
    return name.strip(), parameters


def _value(text: str) -> float | int | bool | str:
    """A number or a bool if the text is one, else the text."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?", text) else text
