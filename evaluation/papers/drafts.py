"""What competes in a table about drafts: one kind of draft at fixed lengths, and the same draft under stops, each at
several settings.

A stop is a policy's spec (`decode.policies.registry`). What its spec leaves open of the policy's grid is chosen on dev
among a few of the grid's values, all of them where `decode.grid` gives them. A tree heeds stops after every second
level, as SVIP's paper has it on EAGLE-2 (`read_every`), or after every one: that is chosen as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decode.drafters.factory import PairModels
from decode.drafters.trees.shapes import Dynamic, Shape
from decode.experiment import Experiment
from decode.policies import FixedLength, Policy
from decode.policies.registry import POLICIES, RULES, read_spec, registered
from evaluation.hierarchies.built import Competitor, Setting
from evaluation.hierarchies.configurations import NO_DRAFT, version_of

FIXED_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)
"""Fixed lengths, unless decode.grid has fixed_length.k."""
NUM_CHOICES = 7
"""Settings of a stop, from the middle of its grid."""


class Kind(NamedTuple):
    """A kind of draft that a table has a row for: chains or trees of one draft."""

    name: str
    shape: Shape | None = None
    """None: a chain."""
    published: int | None = None
    """The length that its paper fixes."""
    read_every: tuple[int, ...] = (1,)
    """Levels after which a stop may be heeded."""


def eagle_2(width: int, num_nodes: int) -> Kind:
    """EAGLE-2's tree; of another size than the published one it says so."""
    shape = Dynamic(width, num_nodes)
    return Kind(
        "EAGLE-2" if shape == Dynamic() else f"EAGLE-2 {width}/{num_nodes}", shape, published=6, read_every=(2, 1)
    )


class Contest(NamedTuple):
    """One kind of draft: without a stop and with each."""

    fixed: Competitor
    """The draft at fixed lengths."""
    published: Setting | None
    """The fixed length of the paper; None where it has none."""
    stops: tuple[Competitor, ...]
    best: Setting | None = None
    """The fixed length that dev chose; None before the choice."""

    @property
    def competitors(self) -> list[Competitor]:
        """All competitors of the contest."""
        return [self.fixed, *self.stops]


class StopChoices(NamedTuple):
    """A stop that was asked for, and its settings to choose from."""

    name: str
    settings: Mapping[str, Policy]
    """Name of each setting -> the policy."""
    version: str


class DraftModels:
    """The models of an experiment for chains and trees alike, which all its drafters share."""

    def __init__(self, experiment: Experiment) -> None:
        self._models = PairModels(lambda: experiment.pair, holds_trees=True)

    def setting(
        self, label: str, policy: Policy, kind: Kind | None = None, read_every: int = 1, version: str = ""
    ) -> Setting:
        """A draft of one kind, a chain without one."""
        return Setting(
            label,
            partial(self._models.drafter, policy, kind and kind.shape, read_every=read_every),
            version,
            self._models,
        )

    @property
    def alone(self) -> Competitor:
        """The target without a draft."""
        return Competitor(NO_DRAFT, 1, (self.setting("", FixedLength(0)),))


def contest_of(
    kind: Kind, stops: Sequence[StopChoices], models: DraftModels, *, lengths: Sequence[int], version: str = ""
) -> Contest:
    """Fixed lengths and stops of one kind of draft.

    Args:
        kind: the kind of draft.
        stops: the stops that `stops_of` gives.
        models: the models that draft and verify.
        lengths: the fixed lengths that `lengths_of` gives.
        version: the version of the draft, where stored generations do not tell by themselves.
    """
    unit = "k={}" if kind.shape is None else "levels={}"
    published = [kind.published] if kind.published else []
    most = max(lengths, default=0)
    lengths = sorted({*(k for k in lengths if k <= most), *published})
    fixed = {k: models.setting(unit.format(k), FixedLength(k), kind, version=version) for k in lengths}

    def settings(stop: StopChoices) -> Iterator[Setting]:
        for (label, policy), every in product(stop.settings.items(), kind.read_every):
            suffix = f"every {every}" if len(kind.read_every) > 1 else ""
            yield models.setting(
                ", ".join(filter(None, (label, suffix))), policy, kind, every, f"{version} {stop.version}".strip()
            )

    return Contest(
        Competitor(kind.name, 2, tuple(fixed.values())),
        fixed[kind.published] if kind.published else None,
        tuple(Competitor(f"{kind.name} + {stop.name}", 2, tuple(settings(stop))) for stop in stops),
    )


def lengths_of(experiment: Experiment, kinds: Sequence[Kind]) -> list[int]:
    """Fixed lengths to choose from.

    Raises:
        ValueError: drafts may not be as long as the published ones.
    """
    longest = experiment.decode.max_draft_length
    published = max((kind.published or 1 for kind in kinds), default=1)
    if longest < published:
        raise ValueError(
            f"decode.max_draft_length is {longest}, and a draft of this table has a published length of {published}; "
            "raise it"
        )
    lengths = experiment.decode.grid.get("fixed_length", {}).get("k", FIXED_LENGTHS)
    return [length for length in lengths if 0 < length <= longest]


def stops_of(experiment: Experiment, specs: Sequence[str]) -> list[StopChoices]:
    """Each with its choices, under a short name.

    Raises:
        ValueError: a spec that does not parse, a head that does not fit this run, an engine's rule.
        FileNotFoundError: no exported head at that path.
    """
    unique = list(dict.fromkeys(specs))
    for spec in unique:
        if (rule := read_spec(spec)[0]) in RULES:
            known = ", ".join(name for name in POLICIES if name not in ("fixed_length", "heuristic"))
            raise ValueError(
                f"--stops names {rule}, an engine's rule, whose settings `acceptance-heads flags` chooses; name one "
                f"of {known}"
            )
    short = list(map(_short, unique))
    names = short if len(set(short)) == len(short) else unique
    return [_stop_of(experiment, spec, name) for spec, name in zip(unique, names, strict=True)]


def _short(spec: str) -> str:
    """Name with a head's directory cut to its last part."""
    path = read_spec(spec)[1].get("head")
    return spec if path is None else spec.replace(str(path), Path(str(path)).name)


def _stop_of(experiment: Experiment, spec: str, name: str) -> StopChoices:
    policy, (kind, given) = experiment.policy(spec), read_spec(spec)
    configured = experiment.decode.grid.get(kind)
    grid = {
        key: values
        for key, values in (configured or registered(kind).values(experiment.decode.max_draft_length)).items()
        if key not in given
    }
    choices = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if configured is None and len(choices) > NUM_CHOICES:
        places = np.linspace(0, len(choices) - 1, NUM_CHOICES + 2)[1:-1]
        choices = [choices[round(place)] for place in places.tolist()]
    if not choices:
        raise ValueError(
            f"decode.grid gives {kind} no value of {next(iter(grid))}; give at least one, or leave {kind} out"
        )
    settings = {
        ", ".join(f"{key}={value}" for key, value in pick.items()): replace(policy, **pick)  # type: ignore[type-var]
        for pick in choices
    }
    return StopChoices(name, settings, version_of(policy))
