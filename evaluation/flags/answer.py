"""An engine's settings, chosen on dev and compared on test with its default, the best fixed length, no speculation, and
what the engine lacks: our policies and heads at the same times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from decode.policies import FixedLength
from evaluation.batches.curves import BatchTimes
from evaluation.batches.load import load_at
from evaluation.competitor import Competitor, competitors_of, label_of, make_competitor
from evaluation.contest import Result
from evaluation.families import BASELINE, BOUNDS, GROUPS, HEADS, TRAINING_FREE
from evaluation.flags.engines import Drafting, Engine, Setting
from evaluation.flags.times import Given
from evaluation.gain import Gain, Spent, Splits
from evaluation.played import Played
from evaluation.table import Table, shown
from evaluation.times import Times
from evaluation.traces.replay import replay_rounds, replay_settings
from evaluation.traces.trace import Trace
from evaluation.tuning.calibration import calibrated_on
from heads.model.head import AcceptanceHead
from store.progress import Bar

Traces = Mapping[Drafting, Splits[Trace]]
NONE, DEFAULT, FIXED, FLAGS = "no speculation", "the engine's default", "best fixed length", "these flags"
OURS = {TRAINING_FREE: "our best policy without training", HEADS: "our best head"}
_BASES = {DEFAULT: "default", FIXED: "fixed length", NONE: "no speculation"}
"""Choices that gains are measured from, and their names in columns."""
_BATCH_COLUMNS = {
    "batch": ("size", ""),
    "number": ("number", ""),
    "tokens/s": ("tokens_per_s", ".1f"),
    "over no speculation": ("over_none", "+.1%"),
    "over one number for all": ("over_one", "+.1%"),
}


class Answer:
    """One engine at one set of times.

    Attributes:
        engine: the engine.
        traces: by how the engine drafts, its default first.
        alone: times without speculation.
        speculating: times with it: what each round pays beyond its draft is part of t_target(k).
        choices: name -> no speculation, the default if there is one, the best fixed length, the flags, and ours.
        labels: name -> how the engine drafts, or the name of our policy; empty without speculation.
        drafting: how the engine drafts at its best setting; None where no speculation is faster.
        best_on_test: tokens per second of the engine's best setting on test.
    """

    def __init__(self, engine: Engine, traces: Traces, times: Times) -> None:
        extra_s = engine.extra_forwards * times.t_draft_s
        self.engine, self.traces, self.alone = engine, traces, times
        self.speculating = replace(times, t_target_s=tuple(seconds + extra_s for seconds in times.t_target_s))
        default_drafting, self._default = next(iter(traces.items()))
        longest = self._default.dev.max_draft_length
        alone = Competitor(NONE, NONE, FixedLength(0), ({},))
        none = _fastest(alone, Splits(*(times.spent(replay_settings(trace, alone.policy)) for trace in self._default)))
        self.choices, self.labels = {NONE: none}, {NONE: ""}
        default = {name: [value] for name, value in (engine.default or {}).items()}
        rules = {DEFAULT: engine.competitor(DEFAULT, longest, default)} if default else {}
        rules[FIXED] = make_competitor(FIXED, "fixed_length", {"k": range(1, longest + 1)})
        for name, rule in rules.items():
            self.choices[name] = _fastest(rule, self.spent_of(rule, default_drafting))
            self.labels[name] = default_drafting.label
        options = engine.competitor(FLAGS, longest)
        played = {drafting: self.spent_of(options, drafting) for drafting in traces}
        best = [(None, none), *((drafting, _fastest(options, spent)) for drafting, spent in played.items())]
        self.drafting, self.choices[FLAGS] = max(best, key=lambda pair: pair[1].on_dev or 0.0)
        self.labels[FLAGS] = self.drafting.label if self.drafting else ""
        self.best_on_test = max([none.tokens_per_s, *(float(s.test.tokens_per_s.max()) for s in played.values())])

    def spent_of(self, competitor: Competitor, drafting: Drafting) -> Splits[Spent]:
        """The engine's tokens and seconds at every setting of a rule."""
        policy, settings = competitor.policy, competitor.settings
        return Splits(*(self.spent(replay_settings(trace, policy), settings) for trace in self.traces[drafting]))

    def spent(self, played: Played, settings: Sequence[Setting]) -> Spent:
        """The engine's tokens and seconds of what its rule played at these settings."""
        times = self.speculating
        spent = times.spent(played)
        if not self.engine.drafts_whole:
            return spent
        lengths = np.array([[int(setting["k"])] for setting in settings])
        rounds = played.per_prompt(played.counts.num_target)
        texts = played.per_prompt(np.ones_like(played.counts.num_target))
        stopping_s = times.stop_s(played.stop_kind) * played.per_prompt(played.counts.num_draft_forwards)
        # a full draft in every round, even where a text has no room for it, and one more for each text
        drafting_s = times.t_draft_s * lengths * (rounds + texts)
        return spent._replace(seconds=drafting_s + stopping_s + times.target_s(lengths) * rounds)

    def add_ours(self, heads: Mapping[str, AcceptanceHead], *, drawn: Splits[Trace]) -> None:
        """Add the best of our policies without training, and of our heads.

        Our loop draws its drafts. If the engine takes the likeliest tokens, ours compete on both kinds of drafts.

        Args:
            heads: by name; one that was trained on other drafts is calibrated to these.
            drawn: the trace of drafts that are drawn as the target's tokens are.
        """
        kinds = {"": self._default}
        if self._default.dev.draft_sampling is not None:
            kinds[" on drawn drafts"] = drawn
        members: dict[str, list[tuple[str, Result]]] = {group: [] for group in OURS}
        for label, traces in kinds.items():
            fitted = {**heads, **calibrated_on(traces.dev, heads)}
            competitors = competitors_of({}, fitted, max_draft_length=traces.dev.max_draft_length)
            for one in Bar(competitors, desc="replay: our policies", unit="policies"):
                group = next((group for group in OURS if GROUPS[group](one.family)), None)
                if group is not None and one.family not in (*BOUNDS, BASELINE):
                    spent = Splits(*(self.speculating.spent(replay_settings(trace, one.policy)) for trace in traces))
                    members[group].append((f"{one.family}{label}", _fastest(one, spent)))
        for group, results in members.items():
            if results:
                best = max(results, key=lambda pair: pair[1].on_dev or 0.0)
                self.labels[OURS[group]], self.choices[OURS[group]] = best

    @property
    def flags(self) -> Result:
        """The engine at its best setting, or without speculation where that is faster."""
        return self.choices[FLAGS]

    @property
    def line(self) -> str:
        """The line to paste."""
        return self.engine.line(self.flags.setting, self.drafting) if self.drafting else self.engine.off

    @property
    def short_of_hindsight(self) -> float:
        """How much slower the flags are than the best setting on test, as a fraction of its speed."""
        return 1 - self.flags.tokens_per_s / self.best_on_test

    def gains(self, choice: Result) -> dict[str, Gain]:
        """Gains over the default, the best fixed length and no speculation, as far as there are any."""
        return {base: choice.over(self.choices[base]) for base in _BASES if base in self.choices}

    def as_dict(self) -> dict[str, Any]:
        """The answer in JSON."""
        return {
            "engine": self.engine.name,
            "version": self.engine.version,
            "line": self.line,
            "speculates": self.drafting is not None,
            "short_of_hindsight": self.short_of_hindsight,
            "choices": [
                {
                    "what": name,
                    "drafts": self.labels[name],
                    "setting": dict(choice.setting),
                    "tokens_per_s": choice.tokens_per_s,
                    "gains": {base: gain._asdict() for base, gain in self.gains(choice).items()},
                }
                for name, choice in self.choices.items()
            ],
        }

    def table(self) -> Table:
        """A row per choice, with its predicted gain over the default, the best fixed length and no speculation."""
        rows = []
        for name, choice in self.choices.items():
            setting, label = label_of("", choice.setting), self.labels[name]
            if name in OURS.values():
                setting = f"{label}: {setting}"
            elif len(self.engine.draftings) > 1 or not label:
                setting = f"{setting}; {label}" if label else "-"
            gains = {
                f"over {_BASES[base]}": "" if self.choices[base] is choice else gain.text
                for base, gain in self.gains(choice).items()
            }
            rows.append({"what": name, "setting": setting, "tokens/s": f"{choice.tokens_per_s:.1f}", **gains})
        note = (
            "gain: predicted from counts and times (law 4.9) on test, with its 95 % interval (paired bootstrap of test "
            f"prompts). Rows of ours need our loop or plugin. The rule is that of {self.engine.name} "
            f"{self.engine.version}. These flags are {self.short_of_hindsight:.1%} slower than the best setting on test"
        )
        return Table(f"{self.engine.name}: settings chosen on dev; {self.alone.title}", rows, note, names=2)

    def sentences(self) -> Iterator[str]:
        """The answer in sentences."""
        flags, where, default = self.flags, self.alone.where, self.choices.get(DEFAULT)
        if self.drafting is None:
            slower = f"No setting of {self.engine.name} is predicted to be faster than the target alone on dev."
            yield f"{where}: do not speculate. {slower}"
        else:
            gains, words = self.gains(flags), {NONE: "no speculation", DEFAULT: "the default", FIXED: f"the {FIXED}"}
            listed = ", ".join(f"{gains[base].words} over {name}" for base, name in words.items() if base in gains)
            doubt = "" if gains[NONE].low > 0 else " This could be chance; raise decode.num_test to settle it."
            yield f"{where}: {label_of('', flags.setting)}, predicted {listed}.{doubt}"
        if default is not None and (gain := default.over(self.choices[NONE])).value < 0:
            yield f"{self.engine.name}'s default is predicted to be slower: {gain.words} over no speculation."
        for name in OURS.values():
            if name in self.choices:
                added = self.choices[name].over(flags).words
                yield f"{name[0].upper()}{name[1:]} ({self.labels[name]}) would add {added}."
        if self.engine.remark:
            yield self.engine.remark

    def in_batches(self, sizes: Sequence[int], given: Given | None) -> list[dict[str, Any]]:
        """The number that is fastest on dev at each size of batch, sizes ascending (law 4.13); 0: do not speculate.

        Args:
            sizes: sequences in a batch, which draft in lockstep.
            given: times by tokens, from the command line; None: the times of one sequence are used for batches.
        """
        traces = self.traces[self.drafting] if self.drafting else self._default
        costs = BatchTimes(self.alone).curves("") if given is None else given.curves
        numbers = make_competitor(FLAGS, "fixed_length", {"k": range(traces.dev.max_draft_length + 1)})
        splits = [(replay_rounds(trace, numbers.policy), len(trace.rows)) for trace in traces]
        rows: list[dict[str, Any]] = []
        for size in sorted(sizes):
            dev, test = (
                [load_at(rounds, k, num_rows, size).spent(costs).tokens_per_s for k in range(len(numbers.settings))]
                for rounds, num_rows in splits
            )
            best = dev.index(max(dev))
            first = rows[0]["number"] if rows else best
            row = {"size": size, "number": best, "tokens_per_s": test[best]}
            rows.append(row | {"over_none": test[best] / test[0] - 1, "over_one": test[best] / test[first] - 1})
        return rows


def _fastest(competitor: Competitor, spent: Splits[Spent]) -> Result:
    """The competitor at its setting of the highest throughput on dev; the first of equals."""
    speeds = spent.dev.tokens_per_s
    best = int(speeds.argmax())
    return Result(competitor=competitor, number=best, on_dev=float(speeds[best]), spent=spent.test.at(best))


def batch_table(rows: Sequence[Mapping[str, Any]], times: Times) -> Table:
    """A row per size of batch with its fastest number of drafted tokens."""
    note = (
        "number: drafted tokens, chosen on dev (0: do not speculate); tokens/s of the whole batch on test, predicted "
        "(law 4.13). One number for all: that of the smallest size. No interval: a batch mixes prompts"
    )
    return Table(f"by sequences in a batch; {times.title}", shown(rows, _BATCH_COLUMNS), note)


def batch_line(engine: Engine, rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers as the engine takes them: vLLM for all sizes in one setting, others one server for each."""
    if engine.name != "vllm":
        return "; ".join(f"{row['size']} sequences: {row['number']}" for row in rows)
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and ranges[-1][2] == row["number"]:
            ranges[-1][1] = row["size"]
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, row["size"], row["number"]])
    most = max(row["number"] for row in rows)
    return f'"num_speculative_tokens": {most}, "num_speculative_tokens_per_batch_size": {ranges}'
