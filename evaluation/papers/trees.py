"""SVIP (arXiv 2411.18462), Tables 3 and 4, clocked: stopping on drafts that are not plain chains, GliDe with CaPE and
EAGLE-2.

    Table 3   a chain, and the same with CaPE's siblings; published with 4 tokens
    Table 4   EAGLE-2's tree; published with six levels, 10 candidates after a node and 59 nodes in all, and with stops
              evaluated after every second level

Each as published, at the fixed length that is fastest on dev, and with every stop at the setting that is fastest on
dev. A stop is a policy's spec (`decode.policies.registry`). What its spec leaves open of the policy's grid is chosen
among a few of the grid's values, all of them where `decode.grid` gives them; for a tree also the
levels between two evaluations. Dev compares the settings of one name by

    T = a rounds + b num_draft_forwards + c rounds + d N_draft

where a and b are fitted to the seconds of drafting, c and d to those of verifying, over all its dev generations (least
absolute deviations). So a tree pays for the nodes that it verifies and a stop for its own work in every draft step (law
4.9), and the noise of the clock does not choose a setting.

The tables have speed-ups over the target alone, by dataset, or by category of the prompts where there is one dataset:
all configurations in turns on every test prompt, medians of several repeats. Generations are stored, so that an
interrupted run resumes. They are of the pair's own draft: a GliDe draft makes Table 3, an EAGLE draft Table 4, and a
draft that is a language model makes both, which are then not of the paper's systems. The paper gives the threshold .5
for GliDe and none for EAGLE-2; its temperatures are 0 (Table 3) and 1 (Table 4), here the config's decides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_gen.prompts.splits import Split
from decode.drafters.factory import PairModels
from decode.drafters.trees import Cape, Dynamic, Shape
from decode.experiment import Experiment
from decode.loop.rounds import Counts
from decode.policies import FixedLength, Policy
from decode.policies.registry import POLICIES, RULES, read_spec, registered
from evaluation.gain import Gain, Spent, gain_over
from evaluation.hierarchies.configurations import NO_DRAFT, version_of
from evaluation.hierarchies.decoded import Configuration, Run, StoredLoop, attributed, chosen_on_dev
from evaluation.hierarchies.times import least_absolute
from evaluation.table import Table
from lm.features.eagle import Eagle
from lm.features.glide import Glide

FIXED_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)
"""Fixed lengths, unless decode.grid has fixed_length.k."""
NUM_CHOICES = 7
"""Settings of a stop, from the middle of its grid."""
Stops = Mapping[str, tuple[str, Mapping[str, Policy]]]
"""Name of a stop -> its version, and name of each of its settings -> the policy."""
Rows = Mapping[str, Run]
"""Method -> its run on test: the draft as published, at its best fixed length, and with every stop."""


class Draft(NamedTuple):
    """A kind of draft that a table has rows for: chains or trees."""

    name: str
    published: int
    """The length that its paper fixes."""
    shape: Shape | None = None
    """None: a chain."""
    read_every: tuple[int, ...] = (1,)
    """Levels between two evaluations of a stop."""


CHAIN, CAPE = Draft("chain", 4), Draft("CaPE", 4, Cape())


def eagle_2(width: int, num_nodes: int) -> Draft:
    """EAGLE-2's tree; its name has the size where that is not the published one."""
    shape = Dynamic(width, num_nodes)
    return Draft("EAGLE-2" if shape == Dynamic() else f"EAGLE-2 {width}/{num_nodes}", 6, shape, read_every=(2, 1))


def fixed_length(draft: Draft, length: int, models: PairModels, version: str = "") -> Configuration:
    """A draft at one length; `models` hold trees."""
    drafter = partial(models.drafter, FixedLength(length), draft.shape)
    return Configuration(draft.name, f"{'levels' if draft.shape else 'k'}={length}", drafter, 2, version, models)


def tree_tables(experiment: Experiment, *, specs: Sequence[str], repeats: int, tree: tuple[int, int]) -> list[Table]:
    """The part of Tables 3 and 4 that this draft makes.

    Raises:
        ValueError: no test prompts, no dev prompts; a draft or a target that cannot hold a tree.
    """
    stops, drafting = stops_of(experiment, specs), experiment.pair.drafting
    drafts = {"3": [CHAIN, CAPE]} if not isinstance(drafting, Eagle) else {}
    drafts |= {"4": [eagle_2(*tree)]} if not isinstance(drafting, Glide) else {}
    lengths = lengths_of(experiment, [draft for of_table in drafts.values() for draft in of_table])
    splits: tuple[Split, ...] = ("dev", "test")
    encoded = {split: {name: experiment.encoded(name, split) for name in experiment.datasets} for split in splits}
    if not any(encoded["test"].values()):
        raise ValueError("there are no test prompts to decode; raise decode.num_test")
    dev, test = ({name: [ids for _, ids in of_set] for name, of_set in encoded[split].items()} for split in splits)
    has_one, models = len(experiment.datasets) == 1, PairModels(lambda: experiment.pair, holds_trees=True)
    columns = [
        (prompt.category if has_one else "") or name for name, of_set in encoded["test"].items() for prompt, _ in of_set
    ]
    tables = []
    for number, of_table in drafts.items():
        folder = f"svip-table-{number}/{Path(experiment.models.draft.path).name}"
        loops = {name: StoredLoop(experiment, name, models, folder=folder) for name in experiment.datasets}
        play_dev = partial(_played, loops, dev)
        methods = [methods_of(draft, stops, models, lengths=lengths, play_dev=play_dev) for draft in of_table]
        alone = Configuration(NO_DRAFT, "", partial(models.drafter, FixedLength(0)), 1, models=models)
        members = {one.key: one for one in (alone, *(one for of_draft in methods for one in of_draft.values()))}
        runs = {run.configuration.key: run for run in _played(loops, test, list(members.values()), repeats=repeats)}
        rows = [{method: runs[one.key] for method, one in of_draft.items()} for of_draft in methods]
        title = (
            f"SVIP Table {number}: speed-up at T = {experiment.sampling.temperature:g}, settings chosen on "
            f"{sum(map(len, dev.values()))} dev prompts, clocked on {len(columns)} test prompts, medians of "
            f"{repeats} turns"
        )
        cells = [row for of_draft in rows for row in row_cells(of_draft, runs[alone.key].measured, columns)]
        tables.append(Table(title, cells, stop_verdict(rows)))
    return tables


def _played(
    loops: Mapping[str, StoredLoop],
    prompts: Mapping[str, Sequence[list[int]]],
    configurations: Sequence[Configuration],
    repeats: int = 1,
) -> list[Run]:
    """The configurations on the prompts of all datasets, as one run each."""
    parts = [loops[name].play(configurations, ids, repeats=repeats) for name, ids in prompts.items() if ids]
    return [Run(same[0].configuration, sum((run.decoded for run in same), ())) for same in zip(*parts, strict=True)]


def lengths_of(experiment: Experiment, drafts: Sequence[Draft]) -> list[int]:
    """Fixed lengths to choose from, the published ones among them.

    Raises:
        ValueError: drafts may not be as long as the published ones.
    """
    longest, published = experiment.decode.max_draft_length, max(draft.published for draft in drafts)
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
    if rules := [rule for rule, _ in map(read_spec, unique) if rule in RULES]:
        known = ", ".join(name for name in POLICIES if name not in ("fixed_length", "heuristic"))
        raise ValueError(
            f"--stops names {rules[0]}, an engine's rule, whose settings `acceptance-heads flags` chooses; name one of "
            f"{known}"
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


def methods_of(
    draft: Draft,
    stops: Stops,
    models: PairModels,
    *,
    lengths: Sequence[int],
    play_dev: Callable[[list[Configuration]], list[Run]],
) -> dict[str, Configuration]:
    """Method -> what is clocked on test: the published length, and what dev chooses of lengths and of each stop.

    Each choice is among the settings of one name, which are decoded alone: another stop changes no choice.

    Args:
        draft: the kind of draft.
        stops: the stops that `stops_of` gives.
        models: the models that draft and verify, which hold trees.
        lengths: the fixed lengths that `lengths_of` gives.
        play_dev: decodes configurations on the dev prompts.

    Raises:
        ValueError: something is to be chosen, and there is no dev prompt.
    """
    fixed = {k: fixed_length(draft, k, models) for k in sorted({*lengths, draft.published})}
    methods = {
        f"{draft.name}, as published": fixed[draft.published],
        f"{draft.name}, best fixed": _fastest(list(fixed.values()), play_dev),
    }
    for stop, (version, settings) in stops.items():
        name, members = f"{draft.name} + {stop}", []
        for (setting, policy), every in product(settings.items(), draft.read_every):
            label = ", ".join(filter(None, (setting, f"every {every}" if len(draft.read_every) > 1 else "")))
            drafter = partial(models.drafter, policy, draft.shape, read_every=every)
            members.append(Configuration(name, label, drafter, 2, version, models))
        methods[name] = _fastest(members, play_dev)
    return methods


def _fastest(members: list[Configuration], play_dev: Callable[[list[Configuration]], list[Run]]) -> Configuration:
    if len(members) == 1:
        return members[0]
    dev = play_dev(members)
    if not dev:
        raise ValueError(
            "fixed lengths and thresholds are chosen on dev prompts, and there are none; raise decode.num_dev"
        )
    times = fitted(dev)
    [best] = chosen_on_dev(dev, lambda run: run.spent(_counted(run.each) @ times).tokens_per_s).values()
    return best


def fitted(runs: Sequence[Run]) -> np.ndarray:
    """a, b, c and d in seconds, from all settings of one name; rounds that read a prompt are left out.

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
    draft_s, target_s = np.array([(one.later_draft_s, one.later_target_s) for one in decoded]).T
    return np.concatenate([least_absolute(counted[:, :2], draft_s), least_absolute(counted[:, 2:], target_s)])


def _counted(each: Counts) -> np.ndarray:
    columns = each.num_target, each.num_draft_forwards, each.num_target, each.num_drafted
    return np.column_stack(columns).astype(np.float64)


def row_cells(rows: Rows, alone: Spent, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Speed-ups over the target alone by column of the prompts and over all of them, and gains over both fixed
    lengths; empty over itself.
    """
    labels = np.array(columns)
    parts = {name: labels == name for name in sorted(set(columns))} | {"Avg.": np.full(len(labels), True)}
    rivals = dict(zip(("published", "best fixed"), rows, strict=False))
    for method, run in rows.items():
        speed_ups = {name: run.measured.at(at).tokens_per_s / alone.at(at).tokens_per_s for name, at in parts.items()}
        cells = {name: f"{speed_up:.2f}" for name, speed_up in speed_ups.items()}
        gains = {
            f"over {rival}": "" if of == method else gain_over(rows[of].measured, run.measured).text
            for rival, of in rivals.items()
        }
        yield {"Methods": method, **cells, "setting": run.configuration.setting, **gains}


def stop_verdict(drafts: Sequence[Rows]) -> str:
    """The stops whose gain over the best fixed length of their own draft has its whole interval above 0, and the
    others.

    The best is the faster one on test, of the length that dev chose and the published one: dev's choice may have been
    unlucky.
    """
    gains: dict[str, Gain] = {}
    for rows in drafts:
        published, best, *stops = rows.items()
        base = max((published, best), key=lambda row: row[1].measured.tokens_per_s)[1].measured
        gains |= {method: gain_over(base, run.measured) for method, run in stops}
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
