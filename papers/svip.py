"""SVIP (arXiv 2411.18462): Tables 1, 2, 5 and 6 replayed on test, and Tables 3 and 4, drafts that are not plain chains,
clocked.

Tables 1 and 5 have a column per category of the prompts (SpecBench's), greedy and at temperature 1; Tables 2 and 6 a
column per generation length, at temperature 1 and greedy: speed-ups of a constant length of 5, of the heuristic, and of
SVIP. The pair's `Sampling` decides which two are made. SVIP's threshold is the paper's where the pair is one of its
pairs, and for other pairs what its procedure chooses: of {0.2, 0.3, 0.4, 0.5} the fastest on 8 prompts held out, here
of dev. The heuristic starts at 5. Departures: drafts end at decode.max_draft_length (the paper's limit is 40); the
times of a forward do not grow with the context; the speed-up of one generation length is that of the first so many
tokens of the longer generations.

    Table 3   a chain, and the same with CaPE's siblings; published with 4 tokens of a GliDe draft
    Table 4   EAGLE-2's tree; published with six levels, 10 candidates after a node and 59 nodes in all, and with stops
              evaluated after every second level

Each as published, at the fixed length that is fastest on dev, and with every stop at the setting that is fastest on
dev. A stop is a policy's spec (`decode.policies.registry`). What its spec leaves open is chosen among a few values of
the policy's grid, all of them where `decode.grid` gives them; for a tree also the levels between two evaluations.

Dev compares the settings of one competitor by law 4.9, its times fitted to all their generations: seconds of drafting
by rounds and draft forwards, of verifying by rounds and nodes. So a tree pays for the nodes that it verifies, and the
noise of the clock does not choose a setting. Test prompts are clocked: all competitors in turns, medians of several
repeats, speed-ups by dataset, or by category where there is one dataset.

A draft that is a language model makes both tables, which are then not of the paper's systems. The paper gives the
threshold .5 for GliDe and none for EAGLE-2; its temperatures are 0 (Table 3) and 1 (Table 4), here the config's
decides.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decode.drafters.factory import PairModels
from decode.drafters.trees import SHAPES, Shape
from decode.experiment import Experiment
from decode.loop.decoder import SpeculativeDecoder
from decode.policies import Entropy, FixedLength, Heuristic, Policy
from decode.policies.batch import Curve
from decode.policies.registry import RULES, read_spec, registered
from evaluation.competitor import Competitor
from evaluation.contest import Result, best_setting
from evaluation.costs.machine import costs_for
from evaluation.gain import Throughput, conclusion
from evaluation.table import Table
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from lm.features.eagle import Eagle
from lm.features.glide import Glide
from papers.hierarchies.configurations import NO_DRAFT
from papers.hierarchies.decoded import Decoded, StoredLoop, play_all, version_of
from papers.hierarchies.tables import result_name
from papers.hierarchies.times import fitted_seconds

PUBLISHED = {"pythia": 0.4, "qwen2.5": 0.3, "llama-3": 0.3}
"""Part of the target's name -> the threshold that the paper chose for its pair."""
CHOICES = (0.2, 0.3, 0.4, 0.5)
HELD_OUT = 8
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192)
"""Generation lengths; the paper prints those from 128 on, the shorter ones are for pairs that write little."""
FIXED_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)
"""Fixed lengths, unless decode.grid has fixed_length.k."""
NUM_CHOICES = 7
"""Settings of a stop, from the middle of its grid."""
_SMALLEST_S = 1e-12
"""Instead of a fitted time of 0."""


def svip_tables(experiment: Experiment) -> list[Table]:
    """Both tables of this pair's sampling."""
    folder = trace_folder(experiment)
    folder.complete()
    traces = {dataset: folder.load(dataset) for dataset in experiment.datasets}
    times = costs_for(experiment)
    threshold, why = threshold_for(Path(experiment.models.target.path).name, next(iter(traces.values())).dev, times)
    methods: dict[str, Policy] = {"Const.": FixedLength(5), "Heuristics": Heuristic(5), "SVIP": Entropy(threshold)}
    longest = experiment.decode.max_new_tokens
    lengths = [length for length in LENGTHS if length <= longest] or [longest]
    speeds: dict[str, dict[str, float]] = {name: {} for name in methods}
    by_length = []
    for dataset, trace in traces.items():
        cuts = {str(k): trace.test.select(range(len(trace.test.rows)), num_tokens=k) for k in lengths}
        prefix = f"{dataset}: " if len(traces) > 1 else ""
        for name, policy in methods.items():
            speeds[name] |= by_category(trace.test, policy, times, dataset)
            tokens_per_s = {k: times.tokens_per_s(replay_settings(cut, policy))[0] for k, cut in cuts.items()}
            cells = {k: f"{speed * times.alone_s:.2f}" for k, speed in tokens_per_s.items()}
            by_length.append({"Methods": f"{prefix}{name}"} | cells)
    first, second = (1, 6) if experiment.sampling.is_greedy else (5, 2)
    figures = f"replayed on test, predicted at {times.title}; h = {threshold:g} ({why})"
    return [
        Table(f"SVIP Table {first}: speed-up by category, {figures}", category_rows(speeds)),
        Table(f"SVIP Table {second}: speed-up by generation length, {figures}", by_length),
    ]


def threshold_for(target: str, dev: Trace, times: Times) -> tuple[float, str]:
    """The threshold max_sqrt_entropy, and its origin."""
    for name, threshold in PUBLISHED.items():
        if name in target.lower():
            return threshold, "the paper's"
    held_out = dev.select(range(min(HELD_OUT, len(dev.rows))))
    number, _ = best_setting(replay_settings(held_out, Entropy(np.array(CHOICES))), times)  # type: ignore[arg-type]
    return CHOICES[number], f"chosen on {len(held_out.rows)} dev prompts"


def by_category(trace: Trace, policy: Policy, times: Times, dataset: str) -> dict[str, float]:
    """Predicted speed-ups over the target alone by category of the prompts; a dataset without categories is one."""
    played = replay_settings(trace, policy)
    [tokens] = played.counts.num_emitted
    [seconds] = times.time_s(played)
    alone = Throughput(tokens, tokens * times.alone_s)
    return speed_ups(Throughput(tokens, seconds), alone, [row.category or dataset for row in trace.rows])


def speed_ups(
    throughput: Throughput, alone: Throughput, columns: Sequence[str], total: str | None = None
) -> dict[str, float]:
    """Speed-ups over the target alone on the prompts of each column, columns in alphabetical order, and on all in a
    column `total`; `columns` has the column of each prompt, such as its category.
    """
    labels = np.array(columns)
    parts = {name: labels == name for name in sorted(set(columns))} | ({total: slice(None)} if total else {})
    return {name: float(throughput.at(at).tokens_per_s / alone.at(at).tokens_per_s) for name, at in parts.items()}


def category_rows(speeds: Mapping[str, Mapping[str, float]]) -> list[dict[str, str]]:
    """A column per category; the last is their mean, with SVIP's gain over the constant."""
    means = {name: np.mean(list(of_parts.values())) for name, of_parts in speeds.items()}
    gain = {"SVIP": f" ({means['SVIP'] / means['Const.'] - 1:+.1%})"}
    return [
        {"Methods": name}
        | {category: f"{speed:.2f}" for category, speed in of_parts.items()}
        | {"Avg.": f"{means[name]:.2f}{gain.get(name, '')}"}
        for name, of_parts in speeds.items()
    ]


class DraftKind(NamedTuple):
    """A kind of draft that a table has rows for: chains or trees."""

    name: str
    published: int
    """The length that its paper fixes; of a tree, its levels."""
    shape: Shape | None = None
    """None: a chain."""
    every: tuple[Mapping[str, int], ...] = ({},)
    """Levels between two evaluations of a stop, as settings."""


CHAIN = DraftKind("chain", 4)
CAPE = DraftKind("CaPE", 4, SHAPES["cape"])
EAGLE_2 = DraftKind("EAGLE-2", 6, SHAPES["eagle2"], every=({"every": 2}, {"every": 1}))


def competitor_of(experiment: Experiment, models: PairModels, draft: DraftKind, stop: Competitor) -> Competitor:
    """A stop on a draft; `models` hold trees."""

    def build(every: int = 1, **setting: Any) -> SpeculativeDecoder:
        policy = replace(stop.policy, **setting)  # type: ignore[type-var]
        return models.decoder(
            models.drafter(policy, draft.shape, read_every=every),
            sampling=experiment.sampling,
            max_draft_length=experiment.decode.max_draft_length,
        )

    name = f"{draft.name} + {stop.name}" if stop.name else draft.name
    return replace(stop, family=name, name=name, policy=FixedLength(0), build=build)


def fixed(lengths: Iterable[int], *, version: str = "") -> Competitor:
    """Fixed lengths, the stop without a name."""
    return Competitor("", "", FixedLength(0), tuple({"k": length} for length in lengths), version=version)


def tree_tables(experiment: Experiment, *, specs: Sequence[str], repeats: int) -> list[Table]:
    """The part of Tables 3 and 4 that this draft makes; ValueError for no test or dev prompts, and for a draft or a
    target that cannot hold a tree.
    """
    stops = stop_competitors(experiment, specs)
    drafting = experiment.pair.drafting
    drafts = {"3": [CHAIN, CAPE]} if not isinstance(drafting, Eagle) else {}
    drafts |= {"4": [EAGLE_2]} if not isinstance(drafting, Glide) else {}
    lengths = lengths_of(experiment, [draft for of_table in drafts.values() for draft in of_table])
    sets = experiment.datasets
    models = PairModels(lambda: experiment.pair, holds_trees=True)
    num_dev = sum(len(experiment.prompt_ids(name, "dev")) for name in sets)
    tests = [(name, prompt) for name in sets for prompt, _ in experiment.encoded(name, "test")]
    columns = [(prompt.category if len(sets) == 1 else "") or name for name, prompt in tests]
    made = partial(competitor_of, experiment, models)
    tables = []
    for number, of_table in drafts.items():
        folder = f"svip-table-{number}/{Path(experiment.models.draft.path).name}"
        loops = [StoredLoop(experiment, name, folder=folder) for name in sets]
        methods = [
            {method: at_fastest_setting(made(draft, stop), loops) for method, stop in methods_of(draft, stops, lengths)}
            for draft in of_table
        ]
        competitors = [made(DraftKind(NO_DRAFT, 0), fixed([0])), *(entry for of in methods for entry in of.values())]
        results = (member.result() for member in play_all(loops, competitors, "test", repeats=repeats))
        alone = next(results).throughput
        rows = [{method: next(results) for method in of_draft} for of_draft in methods]
        title = (
            f"SVIP Table {number}: speed-up at T = {experiment.sampling.temperature:g}, settings chosen on {num_dev} "
            f"dev prompts, clocked on {len(tests)} test prompts, medians of {repeats} turns"
        )
        cells = [row for of_draft in rows for row in row_cells(of_draft, alone, columns)]
        tables.append(Table(title, cells, stop_verdict(rows)))
    return tables


def lengths_of(experiment: Experiment, drafts: Sequence[DraftKind]) -> list[int]:
    """Fixed lengths to choose from; ValueError if drafts may not be as long as the published ones."""
    longest = experiment.decode.max_draft_length
    published = max(draft.published for draft in drafts)
    if longest < published:
        raise ValueError(
            f"decode.max_draft_length is {longest}, and a draft of this table has a published length of {published}; "
            "raise it"
        )
    lengths = experiment.decode.grid.get("fixed_length", {}).get("k", FIXED_LENGTHS)
    return [length for length in lengths if 0 < length <= longest]


def stop_competitors(experiment: Experiment, specs: Sequence[str]) -> list[Competitor]:
    """The stops of these specs, with the settings that each leaves open. ValueError for a spec that does not parse, a
    head that does not fit this run, or an engine's rule; FileNotFoundError for no exported head at that path.
    """
    stops = []
    for spec in dict.fromkeys(specs):
        kind, given = read_spec(spec)
        if kind in RULES:
            raise ValueError(
                f"--stops names {kind}, an engine's rule, which `acceptance-heads flags` tunes; name a policy"
            )
        policy = experiment.policy(spec)
        configured = experiment.decode.grid.get(kind)
        grid = configured or registered(kind).values(experiment.decode.max_draft_length)
        grid = {key: values for key, values in grid.items() if key not in given}
        choices = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        if not choices:
            raise ValueError(f"decode.grid gives {kind} no value of {next(iter(grid))}; give one, or leave {kind} out")
        if configured is None and len(choices) > NUM_CHOICES:
            middle = np.linspace(0, len(choices) - 1, NUM_CHOICES + 2)[1:-1]
            choices = [choices[round(index)] for index in middle.tolist()]
        stops.append(Competitor(spec, spec, policy, tuple(choices), version=version_of(policy)))
    return stops


def methods_of(
    draft: DraftKind, stops: Sequence[Competitor], lengths: Sequence[int]
) -> Iterator[tuple[str, Competitor]]:
    """Rows of a draft: the published length, the lengths of which dev chooses, and each stop likewise."""
    yield f"{draft.name}, as published", fixed([draft.published])
    yield f"{draft.name}, best fixed", fixed(sorted({*lengths, draft.published}))
    for stop in stops:
        both = tuple({**setting, **every} for setting, every in product(stop.settings, draft.every))
        yield f"{draft.name} + {stop.name}", replace(stop, settings=both)


def at_fastest_setting(competitor: Competitor, loops: Sequence[StoredLoop]) -> Competitor:
    """The competitor at its setting that is fastest on dev, where only its own settings are decoded: another stop
    changes no choice. ValueError for several settings and no dev prompts.
    """
    if len(competitor.settings) == 1:
        return competitor
    dev = play_all(loops, [competitor], "dev")
    if not dev:
        raise ValueError(
            "fixed lengths and thresholds are chosen on dev prompts, and there are none; raise decode.num_dev"
        )
    return competitor.at(best_setting(dev[0].played, fitted_times(dev))[0])


def fitted_times(decoded: Sequence[Decoded]) -> Times:
    """Times of a round, a draft step and a verified node, from all settings, by `fitted_seconds`."""
    (draft_s, step_s), (target_s, node_s), _ = fitted_seconds(
        decoded,
        lambda later: [later.counts.num_target, later.counts.num_draft_forwards],
        lambda later: [later.counts.num_target, later.counts.num_drafted],
    )
    alone_s = max(draft_s + target_s, _SMALLEST_S)
    return Times(Curve.line(max(step_s, _SMALLEST_S)), Curve.line(alone_s, node_s), "fitted")


def row_cells(rows: Mapping[str, Result], alone: Throughput, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Speed-ups over the target alone by column of the prompts and over all of them, and gains over both fixed
    lengths; empty over itself. `rows`: the draft as published, at its best fixed length, and with every stop.
    """
    rivals = dict(zip(("published", "best fixed"), rows, strict=False))
    for method, result in rows.items():
        speeds = speed_ups(result.throughput, alone, columns, "Avg.")
        gains = {f"over {rival}": "" if of == method else result.over(rows[of]).text for rival, of in rivals.items()}
        cells = {name: f"{speed:.2f}" for name, speed in speeds.items()}
        yield {"Methods": method, **cells, "setting": result.label, **gains}


def stop_verdict(drafts: Sequence[Mapping[str, Result]]) -> str:
    """How each stop compares with the best fixed length of the same draft: the faster one on test, of the length that
    dev chose and the published one, since dev's choice may have been unlucky.
    """
    sentences = []
    for published, best, *stops in (rows.values() for rows in drafts):
        base = max((published, best), key=lambda result: result.tokens_per_s)
        num_prompts = len(base.throughput.tokens)
        sentences += [conclusion(stop.family, stop.over(base), result_name(base), num_prompts) for stop in stops]
    return ". ".join(sentences)
