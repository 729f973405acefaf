"""One kind of draft at fixed lengths and under stops: dev chooses the settings, the clock compares them on test.

A stop is a policy's spec (`decode.policies.registry`). What its spec leaves open of the policy's grid is chosen on dev
among a few of the grid's values, all of them where `decode.grid` gives them. A tree asks its stop after every level, or
after every second one, as SVIP's paper does with EAGLE-2 (`read_every`): that is chosen as well. Dev compares by

    T = a rounds + b num_draft_forwards + c rounds + d N_draft

where a and b are fitted to the seconds of drafting, c and d to those of verifying, over all dev generations of one name
(least absolute deviations). So a tree pays for the nodes that it verifies and a stop for its own work in every draft
step (law 4.9), and the noise of the clock does not choose a setting.

A stop is compared with the same draft at its published length and at the fixed length that dev chose, and has to beat
the faster of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decode.drafters.factory import PairModels
from decode.drafters.trees.shapes import Dynamic, Shape
from decode.experiment import Experiment
from decode.loop.counts import Counts
from decode.policies import FixedLength, Policy
from decode.policies.registry import POLICIES, RULES, read_spec, registered
from evaluation.gain import Gain, Spent, gain_over
from evaluation.hierarchies.configurations import NO_DRAFT, version_of
from evaluation.hierarchies.decoded import Configuration, Run, StoredLoop, attributed, chosen_on_dev
from evaluation.hierarchies.times import least_absolute

FIXED_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)
"""Fixed lengths, unless decode.grid has fixed_length.k."""
NUM_CHOICES = 7
"""Settings of a stop, from the middle of its grid."""
PUBLISHED, BEST = "published", "best fixed"
Stops = Mapping[str, tuple[str, Mapping[str, Policy]]]
"""Name of a stop -> its version, and name of each of its settings -> the policy."""


class Draft(NamedTuple):
    """A kind of draft that a table has rows for: chains or trees."""

    name: str
    shape: Shape | None = None
    """None: a chain."""
    published: int | None = None
    """The length that its paper fixes."""
    read_every: tuple[int, ...] = (1,)
    """After how many levels a stop may be asked."""

    def label(self, length: int | None) -> str:
        """Setting of a fixed length."""
        return f"{'k' if self.shape is None else 'levels'}={length}"


def eagle_2(width: int, num_nodes: int) -> Draft:
    """EAGLE-2's tree; its name has the size where that is not the published one."""
    shape = Dynamic(width, num_nodes)
    name = "EAGLE-2" if shape == Dynamic() else f"EAGLE-2 {width}/{num_nodes}"
    return Draft(name, shape, published=6, read_every=(2, 1))


class Finalists(NamedTuple):
    """What runs on test of one kind of draft."""

    fixed: Mapping[str, Configuration]
    """PUBLISHED, where the paper fixes a length, and BEST -> the draft at that length."""
    stops: Sequence[Configuration]

    @property
    def all(self) -> list[Configuration]:
        """Every configuration once."""
        return list({one.key: one for one in (*self.fixed.values(), *self.stops)}.values())


class Line(NamedTuple):
    """A row of a table, clocked on test."""

    method: str
    run: Run
    rivals: Mapping[str, Spent]
    """PUBLISHED and BEST, but for the row itself."""
    is_stop: bool

    def gain(self, rival: str) -> str:
        """Gain over a rival; empty over itself, and where a draft has no published length."""
        return gain_over(self.rivals[rival], self.run.measured).text if rival in self.rivals else ""


def target_alone(models: PairModels) -> Configuration:
    """The target without a draft."""
    return Configuration(NO_DRAFT, "", partial(models.drafter, FixedLength(0)), 1, models=models)


def configurations_of(
    draft: Draft, stops: Stops, models: PairModels, *, lengths: Sequence[int], version: str = ""
) -> list[Configuration]:
    """Fixed lengths and stops of one kind of draft.

    Args:
        draft: the kind of draft.
        stops: the stops that `stops_of` gives.
        models: the models that draft and verify, which hold trees.
        lengths: the fixed lengths that `lengths_of` gives.
        version: the version of the draft, where its stored generations lie beside those of another.
    """

    def made(name: str, setting: str, policy: Policy, every: int = 1, version: str = version) -> Configuration:
        drafter = partial(models.drafter, policy, draft.shape, read_every=every)
        return Configuration(name, setting, drafter, 2, version, models)

    found = [
        made(draft.name, draft.label(k), FixedLength(k)) for k in sorted({*lengths, draft.published or lengths[0]})
    ]
    for stop, (stop_version, settings) in stops.items():
        for (setting, policy), every in product(settings.items(), draft.read_every):
            label = filter(None, (setting, f"every {every}" if len(draft.read_every) > 1 else ""))
            both = f"{version} {stop_version}".strip()
            found.append(made(f"{draft.name} + {stop}", ", ".join(label), policy, every, both))
    return found


def lengths_of(experiment: Experiment, drafts: Sequence[Draft]) -> list[int]:
    """Fixed lengths to choose from.

    Raises:
        ValueError: drafts may not be as long as the published ones.
    """
    longest = experiment.decode.max_draft_length
    published = max((draft.published or 1 for draft in drafts), default=1)
    if longest < published:
        raise ValueError(
            f"decode.max_draft_length is {longest}, and a draft of this table has a published length of {published}; "
            "raise it"
        )
    lengths = experiment.decode.grid.get("fixed_length", {}).get("k", FIXED_LENGTHS)
    return [length for length in lengths if 0 < length <= longest]


def stops_of(experiment: Experiment, specs: Sequence[str]) -> Stops:
    """Each stop with its settings; the name of a head's is the last part of its path where that is unique.

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
    paths = [str(read_spec(spec)[1].get("head", "")) for spec in unique]
    short = [spec.replace(path, Path(path).name) if path else spec for spec, path in zip(unique, paths, strict=True)]
    names = short if len(set(short)) == len(short) else unique
    return {name: _settings_of(experiment, spec) for name, spec in zip(names, unique, strict=True)}


def _settings_of(experiment: Experiment, spec: str) -> tuple[str, dict[str, Policy]]:
    policy, (kind, given) = experiment.policy(spec), read_spec(spec)
    configured = experiment.decode.grid.get(kind)
    grid = configured or registered(kind).values(experiment.decode.max_draft_length)
    grid = {key: values for key, values in grid.items() if key not in given}
    choices = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if not choices:
        raise ValueError(
            f"decode.grid gives {kind} no value of {next(iter(grid))}; give at least one, or leave {kind} out"
        )
    if configured is None and len(choices) > NUM_CHOICES:
        middle = np.linspace(0, len(choices) - 1, NUM_CHOICES + 2)[1:-1]
        choices = [choices[round(index)] for index in middle.tolist()]
    labels = (", ".join(f"{key}={value}" for key, value in choice.items()) for choice in choices)
    policies = (replace(policy, **choice) for choice in choices)  # type: ignore[type-var]
    return version_of(policy), dict(zip(labels, policies, strict=True))


def play(
    loops: Mapping[str, StoredLoop],
    prompts: Mapping[str, Sequence[list[int]]],
    configurations: Sequence[Configuration],
    *,
    repeats: int = 1,
) -> list[Run]:
    """The configurations on the prompts of all datasets, as one run each."""
    parts = [loops[name].play(configurations, ids, repeats=repeats) for name, ids in prompts.items() if ids]
    return joined(parts)


def joined(parts: Sequence[Sequence[Run]]) -> list[Run]:
    """The same configurations over several datasets, as one run each."""
    return [
        replace(same[0], decoded=tuple(one for run in same for one in run.decoded)) for same in zip(*parts, strict=True)
    ]


def chosen(
    draft: Draft, configurations: Sequence[Configuration], play_dev: Callable[[Sequence[Configuration]], list[Run]]
) -> Finalists:
    """The configurations of one kind of draft that are clocked on test.

    They are decoded on dev one name at a time, for each choice is among its own settings: another stop changes none.
    """
    names = dict.fromkeys(one.name for one in configurations)
    groups = ([one for one in configurations if one.name == name] for name in names)
    return finalists_of(draft, configurations, [run for group in groups for run in play_dev(group)])


def finalists_of(draft: Draft, configurations: Sequence[Configuration], dev: Sequence[Run]) -> Finalists:
    """The configurations of one kind of draft that are clocked on test: the published length, and what dev chooses.

    Raises:
        ValueError: something is to be chosen, and there is no dev prompt.
    """
    names = list(dict.fromkeys(one.name for one in configurations))
    runs = [run for run in dev if run.configuration.name in names]
    best = {one.name: one for one in configurations}
    if runs and runs[0].decoded:
        times = {name: fitted([run for run in runs if run.configuration.name == name]) for name in names}
        speed = lambda run: run.spent(_counted(run.each) @ times[run.configuration.name]).tokens_per_s  # noqa: E731
        best = chosen_on_dev(runs, speed)
    elif len(names) < len(configurations):
        raise ValueError(
            "fixed lengths and thresholds are chosen on dev prompts, and there are none; raise decode.num_dev"
        )
    published = [one for one in configurations if (one.name, one.setting) == (draft.name, draft.label(draft.published))]
    fixed = dict(zip((PUBLISHED,), published, strict=False)) | {BEST: best[draft.name]}
    return Finalists(fixed, [best[name] for name in names if name != draft.name])


def fitted(runs: Sequence[Run]) -> np.ndarray:
    """a, b, c and d of one name, in seconds, from all its settings; rounds that read a prompt are left out.

    Raises:
        ValueError: no generation has a second round.
    """
    decoded = [one for run in runs for one in run.decoded if one.later.num_target]
    if not decoded:
        raise ValueError(
            "no dev generation has a second round, so that nothing is timed; raise decode.max_new_tokens or "
            "decode.num_dev"
        )
    counted = _counted(attributed((one.later for one in decoded), runs[0].configuration))
    drafting = least_absolute(counted[:, :2], np.array([one.later_draft_s for one in decoded]))
    return np.concatenate([drafting, least_absolute(counted[:, 2:], np.array([one.later_target_s for one in decoded]))])


def _counted(each: Counts) -> np.ndarray:
    columns = each.num_target, each.num_draft_forwards, each.num_target, each.num_drafted
    return np.column_stack(columns).astype(np.float64)


def lines_of(finalists: Finalists, runs: Sequence[Run]) -> list[Line]:
    """One kind of draft on test: as published, at the fixed length that dev chose, and with every stop.

    The two fixed lengths are each other's rivals, and those of every stop.
    """
    by_key = {run.configuration.key: run for run in runs}
    fixed = {rival: by_key[one.key] for rival, one in finalists.fixed.items()}
    spent = {rival: run.measured for rival, run in fixed.items()}
    lines = []
    for rival, run in fixed.items():
        others = {name: value for name, value in spent.items() if name != rival}
        method = f"{run.configuration.name}, {'as published' if rival == PUBLISHED else rival}"
        lines.append(Line(method, run, others, is_stop=False))
    return lines + [Line(stop.name, by_key[stop.key], spent, is_stop=True) for stop in finalists.stops]


def stop_verdict(lines: Sequence[Line]) -> str:
    """The stops whose gain over the best fixed length of their own draft has its whole interval above 0, and the
    others.

    The best is the faster one on test, of the length that dev chose and the published one: dev's choice may have been
    unlucky.
    """
    gains: dict[str, Gain] = {}
    for line in lines:
        if line.is_stop:
            best = max(line.rivals.values(), key=lambda rival: rival.tokens_per_s)
            gains[line.method] = gain_over(best, line.run.measured)
    # a single prompt has no interval: its standard error is NaN
    won = {name: gain for name, gain in gains.items() if gain.low > 0 and gain.standard_error >= 0}
    lost = {name: gain for name, gain in gains.items() if name not in won}
    on_the_clock = "the best fixed length of the same draft on the clock"
    parts = {
        f"{len(won)} of {len(gains)} stops beat {on_the_clock}": won,
        "not so" if won else f"No stop beats {on_the_clock}": lost,
    }
    listed = {what: ", ".join(f"{name} {gain.text}" for name, gain in part.items()) for what, part in parts.items()}
    return "; ".join(f"{what}: {text}" for what, text in listed.items() if text)
