"""SVIP (arXiv 2411.18462), Tables 3 and 4, clocked: stopping on drafts that are not plain chains, GliDe with CaPE and
EAGLE-2.

    Table 3   a chain, and the same with CaPE's siblings; published with 4 tokens
    Table 4   EAGLE-2's tree; published with six levels, 10 candidates after a node and 59 nodes in all, and with stops
              evaluated after every second level

Each as published, at the fixed length that is fastest on dev, and with every stop at the setting that is fastest on
dev. A stop is a policy's spec (`decode.policies.registry`). What its spec leaves open of the policy's grid is chosen
among a few of the grid's values, all of them where `decode.grid` gives them; for a tree also the levels between two
evaluations. Dev compares the settings of one competitor by law 4.9, its times fitted to all their generations (least
absolute deviations): seconds of drafting by rounds and draft forwards, of verifying by rounds and nodes. So a tree pays
for the nodes that it verifies and a stop for its own work in every draft step, and the noise of the clock does not
choose a setting.

The tables have speed-ups over the target alone, by dataset, or by category of the prompts where there is one dataset:
all competitors in turns on every test prompt, medians of several repeats. Generations are stored, so that an
interrupted run resumes. They are of the pair's own draft: a GliDe draft makes Table 3, an EAGLE draft Table 4, and a
draft that is a language model makes both, which are then not of the paper's systems. The paper gives the threshold .5
for GliDe and none for EAGLE-2; its temperatures are 0 (Table 3) and 1 (Table 4), here the config's decides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decode.drafters.factory import PairModels
from decode.drafters.trees import Cape, Dynamic, Shape
from decode.experiment import Experiment
from decode.policies import FixedLength, Policy
from decode.policies.registry import POLICIES, RULES, read_spec, registered
from evaluation.competitor import Competitor
from evaluation.contest import Result, best_setting
from evaluation.gain import Gain, Throughput
from evaluation.hierarchies.configurations import NO_DRAFT
from evaluation.hierarchies.decoded import Decoded, StoredLoop, version_of
from evaluation.hierarchies.times import fitted
from evaluation.table import Table
from evaluation.times import Times
from lm.features.eagle import Eagle
from lm.features.glide import Glide

FIXED_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)
"""Fixed lengths, unless decode.grid has fixed_length.k."""
NUM_CHOICES = 7
"""Settings of a stop, from the middle of its grid."""
_SMALLEST_S = 1e-12
"""Instead of a fitted time of 0."""
Play = Callable[[Sequence[Competitor]], list[Decoded]]
"""Decodes competitors on the dev prompts."""


class Draft(NamedTuple):
    """A kind of draft that a table has rows for: chains or trees."""

    name: str
    published: int
    """The length that its paper fixes."""
    shape: Shape | None = None
    """None: a chain."""
    read_every: tuple[int, ...] = (1,)
    """Levels between two evaluations of a stop."""

    def competitor(
        self,
        experiment: Experiment,
        models: PairModels,
        policy: Policy,
        settings: Sequence[Mapping[str, Any]],
        *,
        stop: str = "",
        version: str = "",
    ) -> Competitor:
        """A policy on this draft; `models` hold trees."""
        longest = experiment.decode.max_draft_length

        def build(every: int = 1, **setting: Any) -> Any:
            setting = {("k" if name == "levels" else name): value for name, value in setting.items()}
            drafter = models.drafter(replace(policy, **setting), self.shape, read_every=every)  # type: ignore[type-var]
            return models.decoder(drafter, sampling=experiment.sampling, max_draft_length=longest)

        name = f"{self.name} + {stop}" if stop else self.name
        return Competitor(name, name, FixedLength(0), tuple(settings), build, version=version)

    def lengths(self, lengths: Sequence[int]) -> list[dict[str, int]]:
        """Settings of fixed lengths."""
        return [{"levels" if self.shape else "k": length} for length in lengths]


CHAIN, CAPE = Draft("chain", 4), Draft("CaPE", 4, Cape())


def eagle_2(width: int, num_nodes: int) -> Draft:
    """EAGLE-2's tree; its name has the size where that is not the published one."""
    shape = Dynamic(width, num_nodes)
    return Draft("EAGLE-2" if shape == Dynamic() else f"EAGLE-2 {width}/{num_nodes}", 6, shape, read_every=(2, 1))


def tree_tables(experiment: Experiment, *, specs: Sequence[str], repeats: int, tree: tuple[int, int]) -> list[Table]:
    """The part of Tables 3 and 4 that this draft makes.

    Raises:
        ValueError: no test prompts, no dev prompts; a draft or a target that cannot hold a tree.
    """
    stops, drafting = stops_of(experiment, specs), experiment.pair.drafting
    drafts = {"3": [CHAIN, CAPE]} if not isinstance(drafting, Eagle) else {}
    drafts |= {"4": [eagle_2(*tree)]} if not isinstance(drafting, Glide) else {}
    lengths = lengths_of(experiment, [draft for of_table in drafts.values() for draft in of_table])
    encoded = {name: experiment.encoded(name, "test") for name in experiment.datasets}
    if not any(encoded.values()):
        raise ValueError("there are no test prompts to decode; raise decode.num_test")
    dev = {name: experiment.prompt_ids(name, "dev") for name in experiment.datasets}
    test = {name: [ids for _, ids in of_set] for name, of_set in encoded.items()}
    has_one, models = len(experiment.datasets) == 1, PairModels(lambda: experiment.pair, holds_trees=True)
    columns = [(prompt.category if has_one else "") or name for name, of in encoded.items() for prompt, _ in of]
    tables = []
    for number, of_table in drafts.items():
        folder = f"svip-table-{number}/{Path(experiment.models.draft.path).name}"
        loops = {name: StoredLoop(experiment, name, folder=folder) for name in experiment.datasets}
        members_of = partial(methods_of, experiment, models, stops, lengths, partial(_played, loops, dev))
        methods = [members_of(draft) for draft in of_table]
        alone = Draft(NO_DRAFT, 0).competitor(experiment, models, FixedLength(0), [{}])
        every = {
            _key(member): member
            for member in (alone, *(member for of_draft in methods for member in of_draft.values()))
        }
        played = _played(loops, test, list(every.values()), repeats=repeats)
        results = dict(zip(every, (member.result() for member in played), strict=True))
        rows = [{method: results[_key(member)] for method, member in of_draft.items()} for of_draft in methods]
        title = (
            f"SVIP Table {number}: speed-up at T = {experiment.sampling.temperature:g}, settings chosen on "
            f"{sum(map(len, dev.values()))} dev prompts, clocked on {len(columns)} test prompts, medians of "
            f"{repeats} turns"
        )
        cells = [row for of_draft in rows for row in row_cells(of_draft, results[_key(alone)].throughput, columns)]
        tables.append(Table(title, cells, stop_verdict(rows)))
    return tables


def _key(competitor: Competitor) -> str:
    return f"{competitor.family} {competitor.settings[0]}"


def _played(
    loops: Mapping[str, StoredLoop],
    prompts: Mapping[str, Sequence[list[int]]],
    competitors: Sequence[Competitor],
    repeats: int = 1,
) -> list[Decoded]:
    parts = [loops[name].play(competitors, ids, repeats=repeats) for name, ids in prompts.items() if ids]
    return [Decoded.joined(same) for same in zip(*parts, strict=True)]


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


def stops_of(experiment: Experiment, specs: Sequence[str]) -> dict[str, tuple[Policy, list[dict[str, Any]]]]:
    """Name of a stop -> its policy and settings; the name of a head's is the last part of its path where that is
    unique.

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
    return {
        name: (experiment.policy(spec), _settings_of(experiment, spec))
        for name, spec in zip(names, unique, strict=True)
    }


def _settings_of(experiment: Experiment, spec: str) -> list[dict[str, Any]]:
    kind, given = read_spec(spec)
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
    return choices


def methods_of(
    experiment: Experiment,
    models: PairModels,
    stops: Mapping[str, tuple[Policy, Sequence[Mapping[str, Any]]]],
    lengths: Sequence[int],
    play_dev: Play,
    draft: Draft,
) -> dict[str, Competitor]:
    """Method -> what is clocked on test: the published length, and what dev chooses of lengths and of each stop.

    Each choice is among the settings of one competitor, which are decoded alone: another stop changes no choice.

    Raises:
        ValueError: something is to be chosen, and there is no dev prompt.
    """
    fixed = draft.lengths(sorted({*lengths, draft.published}))
    made = partial(draft.competitor, experiment, models)
    methods = {
        f"{draft.name}, as published": made(FixedLength(0), draft.lengths([draft.published])),
        f"{draft.name}, best fixed": fastest_on_dev(made(FixedLength(0), fixed), play_dev),
    }
    every = [{"every": every} for every in draft.read_every] if len(draft.read_every) > 1 else [{}]
    for stop, (policy, settings) in stops.items():
        both = [{**setting, **levels} for setting, levels in product(settings, every)]
        competitor = made(policy, both, stop=stop, version=version_of(policy))
        methods[competitor.family] = fastest_on_dev(competitor, play_dev)
    return methods


def fastest_on_dev(competitor: Competitor, play_dev: Play) -> Competitor:
    """The competitor at its setting that is fastest on dev."""
    if len(competitor.settings) == 1:
        return competitor
    dev = play_dev([competitor])
    if not dev:
        raise ValueError(
            "fixed lengths and thresholds are chosen on dev prompts, and there are none; raise decode.num_dev"
        )
    return competitor.at(best_setting(dev[0].played, times_of(dev))[0])


def times_of(decoded: Sequence[Decoded]) -> Times:
    """Times of a round, a draft step and a verified node, from all settings; rounds that read a prompt are left out.

    Raises:
        ValueError: no generation has a second round.
    """
    (draft_s, step_s), (target_s, node_s), _ = fitted(
        decoded,
        lambda later: [later.counts.num_target, later.counts.num_draft_forwards],
        lambda later: [later.counts.num_target, later.counts.num_drafted],
        fewest=1,
    )
    alone_s = max(draft_s + target_s, _SMALLEST_S)
    return Times(max(step_s, _SMALLEST_S), (alone_s, alone_s + node_s), "fitted")


def row_cells(rows: Mapping[str, Result], alone: Throughput, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Speed-ups over the target alone by column of the prompts and over all of them, and gains over both fixed
    lengths; empty over itself. `rows`: the draft as published, at its best fixed length, and with every stop.
    """
    labels = np.array(columns)
    parts = {name: labels == name for name in sorted(set(columns))} | {"Avg.": np.full(len(labels), True)}
    rivals = dict(zip(("published", "best fixed"), rows, strict=False))
    for method, result in rows.items():
        speed_ups = {
            name: result.throughput.at(at).tokens_per_s / alone.at(at).tokens_per_s for name, at in parts.items()
        }
        cells = {name: f"{speed_up:.2f}" for name, speed_up in speed_ups.items()}
        gains = {f"over {rival}": "" if of == method else result.over(rows[of]).text for rival, of in rivals.items()}
        yield {"Methods": method, **cells, "setting": result.label, **gains}


def stop_verdict(drafts: Sequence[Mapping[str, Result]]) -> str:
    """The stops whose gain over the best fixed length of their own draft has its whole interval above 0, and the
    others.

    The best is the faster one on test, of the length that dev chose and the published one: dev's choice may have been
    unlucky.
    """
    gains: dict[str, Gain] = {}
    for rows in drafts:
        published, best, *_ = rows.values()
        base = max((published, best), key=lambda result: result.tokens_per_s)
        gains |= {method: result.over(base) for method, result in list(rows.items())[2:]}
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
