"""What competes: a policy whose parameters are arrays, an entry per setting, from the registry or `decode.grid`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from decode.experiment import Experiment
from decode.policies import HeadPolicy, Policy
from decode.policies.registry import AUTO_TOKEN_PROB, LOGISTIC, POLICIES, policy_of, registered
from decode.policies.scores import ScoreHead
from evaluation.families import ORACLE, PERFECT, SPECDEC
from evaluation.played import Played
from evaluation.traces.replay import Oracle
from heads.model.head import AcceptanceHead

if TYPE_CHECKING:  # the loop takes seconds to import, and a replay needs none
    from decode.loop.decoder import SpeculativeDecoder

_HEAD = "head:"
"""How the names of heads' grids begin."""


@dataclass(frozen=True)
class Competitor:
    """One policy whose parameters are arrays, an entry per setting."""

    family: str
    name: str
    policy: Policy
    settings: tuple[Mapping[str, Any], ...]
    build: "Callable[..., SpeculativeDecoder] | None" = None
    """The loop at a setting, whose parameters are its keywords, of what is more than a policy: a hierarchy, a tree."""
    micro_policy: Policy | None = None
    """Of a hierarchy: the policy that stops the level below the draft."""
    version: str = ""
    """Identifies what names and settings do not, such as a head's weights."""

    def at(self, number: int) -> "Competitor":
        return replace(self, settings=(self.settings[number],))

    def policy_at(self, number: int) -> Policy:
        """The policy at a setting, as the loop runs it."""
        return replace(self.policy, **self.settings[number])  # type: ignore[type-var]

    @property
    def head(self) -> str:
        return head_in(self.name)


@dataclass(frozen=True)
class Arm:
    """A competitor and what all its settings did on both splits."""

    competitor: Competitor
    dev: Played
    test: Played


CALIBRATED = "is_calibrated"
"""The parameter of heads that is no number: whether a threshold bounds a calibrated or a raw probability."""
ONLINE = "is_online"
"""The parameter of `auto` that is no number: whether lambda is learned in each generation or is the one of dev."""
_WORDS = {CALIBRATED: ("raw", "calibrated"), ONLINE: ("lambda of dev", "lambda learned online")}
"""Parameter that is no number -> what tables write for False and for True."""


def head_in(name: str) -> str:
    """Name of the head in the name of a grid; empty if there is none."""
    return name.removeprefix(_HEAD) if name.startswith(_HEAD) else ""


def label_of(name: str, setting: Mapping[str, Any]) -> str:
    """A grid's setting in a few characters."""
    if "slope" in setting:  # of a rule that was solved for, the numbers that were fitted
        setting = {key: setting[key] for key in ("slope", "offset")}
    values = ", ".join(_text(key, value, "g", prefix=f"{key}=") for key, value in setting.items())
    return f"{head}: {values}" if (head := head_in(name)) else values or "-"


def competes(name: str, experiment: Experiment) -> bool:
    """Whether decode.policies lets a policy compete."""
    return not experiment.decode.policies or name in experiment.decode.policies


def words_of(parameter: str, *, value: bool) -> str:
    """What tables write for a parameter that is no number."""
    return _WORDS[parameter][value]


def values_of(setting: Mapping[str, Any]) -> str:
    """The values of a setting, without their names."""
    if "slope" in setting:
        return f"{setting['slope']:.3g} logit q(y) {setting['offset']:+.3g}, two numbers fitted on dev"
    return ", ".join(_text(key, value, ".3g") for key, value in setting.items())


def _text(key: str, value: object, form: str, *, prefix: str = "") -> str:
    """The value of a parameter: a number after the prefix, or the words for what is no number."""
    if key in _WORDS:
        return words_of(key, value=bool(value))
    return f"{prefix}{value:{form}}" if isinstance(value, float) else f"{prefix}{value}"


def competitors_of(
    grids: Mapping[str, Mapping[str, Sequence[Any]]],
    heads: Mapping[str, AcceptanceHead],
    *,
    max_draft_length: int,
    policies: Sequence[str] = (),
) -> list[Competitor]:
    """Everything that competes but the bounds.

    Args:
        grids: policy -> parameter -> values, instead of the built-in values of that policy.
        heads: by name; each is a competitor. Thresholds are on calibrated probabilities, which do not depend on the
            weights of the training's loss; those of SpecDec++'s own heads are on raw ones, as in the paper. Values of
            `is_calibrated` in `grids` replace both.
        max_draft_length: the longest fixed length.
        policies: names of those that compete, and fixed lengths, which gains are measured from; empty: all.

    Raises:
        ValueError: an unknown policy or parameter, a value out of range; values of a policy that does not compete.
    """
    values = _values_of(grids, policies, max_draft_length)
    competitors = []
    for name, parameters in values.items():
        if name == AUTO_TOKEN_PROB:
            continue  # `evaluation.contest.Replays.token_rules`: it depends on the times
        if name != "head":
            competitors.append(make_competitor(name, name, parameters))
            continue
        for head_name, head in heads.items():
            family = family_of(head)
            of_head = dict(parameters)
            of_head.setdefault(CALIBRATED, [family != SPECDEC])
            competitor = make_competitor(family, name, of_head, head=head)
            competitors.append(replace(competitor, name=f"{_HEAD}{head_name}"))
    return competitors


def _values_of(
    grids: Mapping[str, Mapping[str, Sequence[Any]]], policies: Sequence[str], max_draft_length: int
) -> dict[str, Mapping[str, Sequence[Any]]]:
    """Policy -> parameter -> values to compare, checked as `competitors_of` says."""
    names = ["fixed_length", *policies] if policies else POLICIES
    values = {name: registered(name).values(max_draft_length) for name in names}
    if policies and (left_out := [name for name in grids if name not in values]):
        raise ValueError(
            f"decode.grid has values for {left_out[0]}, which decode.policies leaves out; add it there, or drop "
            "its values"
        )
    try:
        values |= {name: parameters for name, parameters in grids.items() if registered(name)}
    except ValueError as error:
        raise ValueError(f"decode.grid: {error}") from error
    if (longest := max(values["fixed_length"].get("k", ()), default=0)) > max_draft_length:
        raise ValueError(
            f"decode.grid asks for a fixed length of {longest}; decode.max_draft_length is {max_draft_length}, raise it"
        )
    if AUTO_TOKEN_PROB in grids:
        raise ValueError(
            f"decode.grid has values for {AUTO_TOKEN_PROB}, whose numbers are solved for on dev; drop them there"
        )
    return values


def competitors_with(
    experiment: Experiment, heads: Mapping[str, AcceptanceHead], *, has_heads: bool = False
) -> list[Competitor]:
    """`competitors_of` an experiment with these heads; `has_heads`: they compete whatever decode.policies says."""
    decode = experiment.decode
    return competitors_of(
        decode.grid,
        heads,
        max_draft_length=decode.max_draft_length,
        policies=(*decode.policies, "head") if decode.policies and has_heads else decode.policies,
    )


def make_competitor(
    family: str, name: str, parameters: Mapping[str, Sequence[Any]], *, kind: type[Policy] | None = None, **fixed: Any
) -> Competitor:
    """All combinations of these values of the policy `name`; `kind`: its class, instead of the registry's; `fixed`: its
    other arguments, such as a head.
    """
    if empty := [key for key, values in parameters.items() if not len(values)]:
        raise ValueError(
            f"decode.grid gives {name} no value of {empty[0]}; give at least one, or leave {name} out for the "
            "built-in grid"
        )
    settings = tuple(dict(zip(parameters, values, strict=True)) for values in product(*parameters.values()))
    # A policy whose parameters are arrays is all settings side by side (`evaluation.traces.replay`).
    arrays: dict[str, Any] = {key: np.array([setting[key] for setting in settings]) for key in parameters}
    policy = kind(**arrays, **fixed) if kind else policy_of(name, arrays | fixed)
    return Competitor(family, name, policy, settings)


def family_of(head: AcceptanceHead) -> str:
    """The heads that a head competes with: SpecDec++'s own (fed-time, the hidden state alone), or the others of its
    timing.
    """
    return SPECDEC if head.timing == "fed" and not any(head.inputs) else f"head_{head.timing}"


def bounds(*, perfect_head: bool = True) -> Iterator[Competitor]:
    """The oracle (law 4.10), after the perfect head with and without the lag."""
    settings = tuple({"max_rejection_prob": value} for value in LOGISTIC)
    for name, timing in (("perfect_fed", "fed"), (PERFECT, "drawn")) if perfect_head else ():
        policy = HeadPolicy(ScoreHead("perfect", timing), np.array(LOGISTIC))  # type: ignore[arg-type]
        yield Competitor(name, name, policy, settings)
    yield Competitor(ORACLE, ORACLE, Oracle(), ({},))
