"""A clocked table about drafts: speed-ups by category, what stops gain with 95 % intervals over prompts, and in words
whether one pays.

A stop is held against the same draft at its published length, and at the fixed length that dev chose: the faster of
them it has to beat.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from evaluation.hierarchies.runs import Run
from evaluation.intervals import Gain, Spent, gain_over
from evaluation.papers.drafts import Contest

Runs = Mapping[tuple[str, str], Run]
"""(competitor, key of its setting) -> what it did on the test prompts."""


class Line(NamedTuple):
    """One row of a table."""

    method: str
    run: Run
    published: Run | None = None
    """The published length that the line is held against; None: it is that line itself."""
    best: Run | None = None
    is_stop: bool = False

    @property
    def fastest_fixed(self) -> Run:
        """The fixed length that the others are held against."""
        return max(
            (base for base in (self.published, self.best) if base is not None),
            key=lambda base: base.measured.tokens_per_s,
        )

    @property
    def gains(self) -> dict[str, str]:
        """Over both."""
        bases = {"over published": self.published, "over best fixed": self.best}
        return {name: gain_over(base.measured, self.run.measured).text if base else "" for name, base in bases.items()}


def by_key(runs: Sequence[Run]) -> Runs:
    """Each setting once."""
    return {(run.competitor.name, run.setting.key): run for run in runs}


def lines_of(finalists: Contest, runs: Runs) -> list[Line]:
    """One kind of draft: as published, at the fixed length that dev chose, and with every stop."""
    name = finalists.fixed.name
    assert finalists.best is not None, "dev has chosen"
    best = runs[name, finalists.best.key]
    published = runs[name, finalists.published.key] if finalists.published else None
    lines = [] if published is None else [Line(f"{name}, as published", published, best=best)]
    lines.append(Line(f"{name}, best fixed", best, published))
    return [
        *lines,
        *(
            Line(stop.name, runs[stop.name, stop.settings[0].key], published, best, is_stop=True)
            for stop in finalists.stops
        ),
    ]


def line_rows(lines: Sequence[Line], alone: Run, categories: Sequence[str]) -> list[dict[str, str]]:
    """Speed-ups over the target alone by category of the prompts, over all of them, and gains."""
    labels = np.array(categories)
    parts = {name: labels == name for name in sorted(set(categories))} | {"Avg.": np.full(len(labels), True)}

    def speed_up(run: Run, part: np.ndarray) -> float:
        return _part(run.measured, part).tokens_per_s / _part(alone.measured, part).tokens_per_s

    return [
        {
            "Methods": line.method,
            **{name: f"{speed_up(line.run, part):.2f}" for name, part in parts.items()},
            "setting": line.run.label,
            **line.gains,
        }
        for line in lines
    ]


def stop_verdict(lines: Sequence[Line]) -> str:
    """The stops that beat the best fixed length of their own draft on the clock, the whole interval above 0, and those
    that do not.

    The best is the faster one on test, of the length that dev chose and the published one: dev's choice may have been
    an unlucky one.
    """
    gains = {line.method: gain_over(line.fastest_fixed.measured, line.run.measured) for line in lines if line.is_stop}
    # a single prompt has no interval: NaN is above no bound
    won, lost = (
        {name: gain for name, gain in gains.items() if (gain.low > 0 and gain.standard_error >= 0) == is_won}
        for is_won in (True, False)
    )
    said = {
        f"{len(won)} of {len(gains)} stops beat the best fixed length of the same draft on the clock": won,
        "No stop beats the best fixed length of the same draft on the clock" if not won else "not so": lost,
    }
    return "; ".join(f"{what}: {_listed(which)}" for what, which in said.items() if which)


def _listed(gains: Mapping[str, Gain]) -> str:
    return ", ".join(f"{name} {gain.text}" for name, gain in gains.items())


def shown_speed_up(alone: Spent, own: Spent) -> str:
    """Over the target alone, with its interval."""
    gain = gain_over(alone, own)
    return f"{1 + gain.value:.2f}x ({1 + gain.low:.2f}, {1 + gain.high:.2f})"


def _part(spent: Spent, chosen: np.ndarray) -> Spent:
    return Spent(spent.tokens[chosen], spent.seconds[chosen])
