"""What travels: heads and settings chosen on the home set's dev prompts, judged on the test prompts of every other set.

    at home      chosen on home's dev, reported on home's test
    travelled    chosen on home's dev (head, threshold, index of the rule), reported on the test of a set that nobody
                 tuned to
    tuned there  chosen on that set's own dev, reported on the same test prompts

Gains are over the best fixed length that was tuned there, leads over the best training-free policy that was tuned
there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from evaluation.contest.arms import Arm, Pick, picks_of
from evaluation.contest.results import Result, Yardstick, result_of
from evaluation.contest.tables import ordered, result_frame
from evaluation.families import AUTO, BOUNDS, PERFECT, TRAINING_FREE, family
from evaluation.gain import Gain, gain_over
from evaluation.table import Table, spread
from evaluation.times import Times
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from heads.measures.scores import recalibrated
from heads.model.head import AcceptanceHead
from lm import Sampling


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Replays and yardstick of one dataset at one cost."""

    dataset: str
    arms: Sequence[Arm]
    picks: Mapping[str, Pick]
    """Family -> what dev chose."""
    yardstick: Yardstick
    results: Sequence[Result]

    def speeds_on_dev(self, cost: Times) -> dict[str, float]:
        """Throughput of every family on dev, by which settings and families are chosen."""
        return {name: pick.tokens_per_s_on_dev(cost) for name, pick in self.picks.items()}

    def gain(self, name: str) -> str:
        """Gain over the best fixed length; empty where the family did not compete."""
        return next((f"{result.gain.value:+.1%}" for result in self.results if result.family == name), "")


class Travelled(NamedTuple):
    """A family whose setting was chosen at home, and its result elsewhere."""

    result: Result
    """Result on the foreign set's test; gains and leads as this module's first lines say."""
    kept: Gain | None
    """Throughput over that of the same family tuned there, minus 1; None where it was not."""


def travel(home: Judged, away: Judged, *, test: Trace, cost: Times) -> list[Travelled]:
    """Every family but the bounds.

    Args:
        home: where head and setting are chosen.
        away: the foreign set.
        test: its test prompts.
        cost: of both.
    """
    there, travelled = away.yardstick.spent, []
    for name, pick in picks_of(_moved(home.arms, away.arms, test), cost).items():
        kept = gain_over(there[name], pick.spent(cost)) if name in there else None
        travelled.append(Travelled(result_of(pick, cost, away.yardstick), kept))
    places = {
        result.family: place
        for place, result in enumerate(ordered([travelled_family.result for travelled_family in travelled]))
    }
    return sorted(travelled, key=lambda moved: places[moved.result.family])


def is_of_other_sampling(head: AcceptanceHead, sampling: Sampling) -> bool:
    """Whether it is known to have been trained under another one."""
    return bool(head.provenance.sampling) and Sampling(**head.provenance.sampling) != sampling


def calibrated_on(dev: Trace, heads: Mapping[str, AcceptanceHead]) -> dict[str, AcceptanceHead]:
    """Heads that were trained under another `Sampling`, slope and offset refitted on the path of these prompts, by new
    names; where drafts are drawn by a sampling of their own, every head but fed-time ones, on what a round from each
    position drafts first.
    """
    here, first = np.arange(dev.num_positions), dev.offsets[:-1]
    calibrated = {}
    for name, head in heads.items():
        if not is_of_other_sampling(head, dev.sampling) and dev.draft_sampling is None:
            continue
        if dev.draft_sampling is not None:
            if head.timing == "fed":
                continue
            tokens = dev.first_drawn[dev.is_drafted]
            labels = dev.signals["acceptance_prob"][tokens]
        elif head.timing == "fed":  # it has scored a token once the next one is drawn
            tokens = np.delete(here, first)
            labels = dev.signals["acceptance_prob"][dev.before[tokens]]
        else:
            tokens, labels = (
                here,
                dev.acceptance_rate if head.timing == "prefix" else dev.signals["acceptance_prob"][here],
            )
        can_be_drawn = np.isfinite(dev.signals["log_token_prob"][tokens])  # by a draft with a reduced vocabulary
        fitted = (dev.logit(head)[tokens][can_be_drawn], labels[can_be_drawn])
        calibrated[f"{name} calibrated here"] = recalibrated(head, *map(torch.from_numpy, fitted))
    return calibrated


def _moved(home: Sequence[Arm], away: Sequence[Arm], test: Trace) -> Iterator[Arm]:
    """Home's arms with the foreign test in place of their own; what was replayed there already, which is most, is not
    replayed again.
    """
    replayed = {(arm.grid.family, arm.grid.name): arm.test for arm in away if family(arm.grid.family).kind != AUTO}
    for arm in home:
        if arm.grid.family not in BOUNDS:
            known = replayed.get((arm.grid.family, arm.grid.name))
            yield Arm(arm.grid, arm.dev, replay_settings(test, arm.grid.policy) if known is None else known)


def travel_sheet(travelled: Sequence[Travelled], home: Judged, away: Judged, cost: Times) -> Table:
    """Gains at home, travelled and tuned at the other set, side by side."""
    rows = [
        {
            "policy": family(result.family).label,
            "setting from home": result.label,
            "at home": home.gain(result.family),
            "travelled": result.gain.text,
            "tuned there": away.gain(result.family),
            "travelled over tuned there": kept.text if kept else "",
            "lead": result.lead.text,
        }
        for result, kept in travelled
    ]
    gains = {"at home": home.gain(PERFECT), "tuned there": away.gain(PERFECT)}
    champion = family(away.yardstick.champions[TRAINING_FREE]).label
    return Table(
        f"from {home.dataset} to {away.dataset}; {cost.title}",
        [*rows, {"policy": "perfect head", "setting from home": "tuned there", **gains}],
        "gain over the best fixed length of the set. travelled: head and setting chosen on the dev prompts of "
        f"{home.dataset}, tuned there: of {away.dataset}; lead: of the travelled over the best training-free policy "
        "tuned there "
        f"({champion})",
        names=2,
    )


def travel_frame(travelled: Sequence[Travelled], home: Judged, away: Judged, cost: Times) -> pd.DataFrame:
    """Rows of results.csv: those of the foreign set, chosen at home."""
    frame = result_frame(
        [travelled_family.result for travelled_family in travelled], cost, dataset=away.dataset, chosen_on=home.dataset
    )
    nothing = Gain(*[float("nan")] * 4)
    return frame.join(
        pd.DataFrame([spread("kept", travelled_family.kept or nothing) for travelled_family in travelled])
    )
