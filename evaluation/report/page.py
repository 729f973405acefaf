"""report.html: the evaluation as one page that works offline, in which a reader sets the times of their own hardware.

The page holds the replayed counts of every setting on every prompt and recomputes times, dev-chosen settings and
intervals itself (law 4.9), so the ranking follows the sliders: t_target / t_draft, what a verified token adds, what the
dearest stop adds to a draft step. Nothing is fetched from anywhere. Very large grids are thinned to stay under
`MAX_NUMBERS` counts a split. Batches, which the page cannot replay (law 4.13), are shown as
evaluated: a reader picks one of the costs, what a verified token takes, and the batch size.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from decode.policies.base import JOINT
from evaluation.clock.results import ClockReport
from evaluation.contest.arms import Arm, Pick, Replays, picks_of
from evaluation.contest.colours import colours_of
from evaluation.contest.grids import BOUNDS, label_of
from evaluation.contest.tables import NAMES
from evaluation.costs.model import CostModel
from evaluation.figure import Plot
from evaluation.report.verdict import Answer, called
from evaluation.traces.replay import Replayed
from evaluation.traces.trace import Array
from store.shards import write_atomic

MAX_NUMBERS = 400_000
"""Counts of one kind, split and dataset: about 1 MB each in the page."""
RATIOS = (1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 40.0)
"""t_target / t_draft at which the rule of law 4.11 is solved for the page, which cannot solve it itself."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Contents of the page."""

    about: str
    """One line under the title."""
    directory: Path
    """Folder that report.html and all files beside it are written to."""
    cost: CostModel
    """Times at which the page opens, and those that its rows and sentences have."""
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """Those of each dataset, a cost each; the first is that of `cost`."""
    datasets: dict[str, Sequence[Arm]] = field(default_factory=dict)
    """The arms of each, bounds included."""
    here: dict[str, Sequence[Arm]] = field(default_factory=dict)
    """Arms of each that are made for `cost`."""
    picks: dict[str, Mapping[str, Pick]] = field(default_factory=dict)
    """Family -> what dev chose at `cost`, of each."""
    plots: list[Plot] = field(default_factory=list)
    clocks: list[ClockReport] = field(default_factory=list)
    """Report of each dataset's clock, where there was one."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """The rows of batches.csv, where there were batches."""


def report_arms(replays: Replays, cost: CostModel) -> list[Arm]:
    """Every arm of a dataset, and the rule solved at several ratios."""
    timing = replays.fastest_timing(cost)
    rules = [
        replace(arm, ratio=ratio)
        for ratio in RATIOS
        for arm in replays.auto_arms(cost.with_ratio(ratio), is_online=(False,), timing=timing)
    ]
    return [*replays.arms, *rules]


def write_report(page: Page) -> None:
    """Write the evaluation as one page, report.html, into the page's directory."""
    families = {arm.grid.family for arms in page.datasets.values() for arm in arms}
    data = {
        "names": dict(NAMES),
        "colours": colours_of(sorted(families)),
        "about": page.about,
        "ratio": page.cost.ratio,
        "stop": max(page.cost.shares.values(), default=0.0),
        "curve": _is_curve(page.cost),
        "answers": [_answer(answer) for answers in page.answers.values() for answer in answers],
        "datasets": [_dataset(name, arms, page) for name, arms in page.datasets.items()],
        "plots": [_plot(plot) for plot in page.plots],
        "clocks": [_clock(report) for report in page.clocks],
        "batches": page.batches,
    }
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # A text that holds </script> would end the page's script.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    write_atomic(page.directory / "report.html", template.replace("__DATA__", embedded).encode())


def has_heads(report: Path) -> bool:
    """Whether a written page compares heads."""
    text = report.read_text(encoding="utf-8")
    return any(f'"family":"{prefix}' in text for prefix in ("head_", "auto_"))


def _is_curve(cost: CostModel) -> bool:
    """Whether a verification costs more, or less, with more drafted tokens."""
    return len(set(cost.t_target_s)) > 1


def _answer(answer: Answer) -> dict[str, Any]:
    table, best = answer.table, called(answer.best)
    return {
        "dataset": answer.dataset,
        "costs": answer.costs,
        "verdict": answer.verdict,
        "explained": answer.explained,
        "note": table.note,
        "title": table.title,
        "columns": table.columns,
        "rows": [
            {"cells": [row.get(column, "") for column in table.columns], "best": row["stage"] == best}
            for row in table.rows
        ],
        "picture": _plot(answer.picture),
    }


def _dataset(name: str, arms: Sequence[Arm], page: Page) -> dict[str, Any]:
    listed = [*arms, *page.here.get(name, ())]
    first = {split: getattr(arms[0], split) for split in ("dev", "test")}
    shapes = {split: replayed.per_prompt(replayed.counts.num_emitted)[0] for split, replayed in first.items()}
    num_settings = sum(len(arm.grid.settings) for arm in arms)
    step = max(1, -(-num_settings * max(map(len, shapes.values())) // MAX_NUMBERS))  # rounded up
    return {
        "name": name,
        **{split: {"rows": len(emitted), "tokens": int(emitted.sum())} for split, emitted in shapes.items()},
        "arms": [_arm(arm, step, page.cost) | {"here": place >= len(arms)} for place, arm in enumerate(listed)],
        "picks": _picks([arm for arm in listed if arm.ratio is None], page.cost, listed=listed, step=step),
        "gains": page.answers[name][0].gains if name in page.answers else {},
    }


def _picks(arms: Sequence[Arm], cost: CostModel, *, listed: Sequence[Arm], step: int) -> dict[str, tuple[int, int]]:
    """Family -> (place of its arm among those that are listed, place of its setting there) at these costs."""
    return {
        family: (
            next(place for place, arm in enumerate(listed) if arm is pick.arm),
            _shown(pick.arm, step, cost).index(pick.setting),
        )
        for family, pick in picks_of(arms, cost).items()
    }


def _shown(arm: Arm, step: int, cost: CostModel) -> list[int]:
    """Settings that the page holds: every so many, and the one that dev chooses at these costs."""
    best = int(cost.tokens_per_s(arm.dev).argmax())
    return sorted({*range(0, len(arm.grid.settings), step), best})


def _weight(kind: str, stops: Mapping[str, float]) -> float:
    """Seconds of a stop in units of the dearest one."""
    parts = (stops.get(part, 0.0) for part in kind.split(JOINT))
    return stops.get(kind, sum(parts)) / (max(stops.values(), default=0.0) or 1.0)


def _plot(plot: Plot) -> dict[str, str]:
    return {"svg": plot.svg, "caption": plot.caption}


def _clock(report: ClockReport) -> dict[str, Any]:
    sheet = report.sheet
    return {
        "title": f"{report.dataset}: {report.about}",
        "columns": sheet.columns,
        "rows": [list(row.values()) for row in sheet.rows],
        "verdict": report.verdict,
        "plot": _plot(report.plot),
    }


def _extra(lengths: Array, cost: CostModel) -> Array:
    """What verifications cost beyond one t_target each, in units of t_target."""
    return cost.target_s(lengths) / cost.t_target_s[0] - 1


def _arm(arm: Arm, step: int, cost: CostModel) -> dict[str, Any]:
    shown = _shown(arm, step, cost)
    settings = [arm.grid.settings[setting] for setting in shown]
    return {
        "family": arm.grid.family,
        "name": arm.grid.name,
        "ratio": arm.ratio,
        "bound": arm.grid.family in BOUNDS,
        "stop": _weight(arm.test.stop_kind, cost.shares),
        "settings": [label_of(arm.grid.name, setting) for setting in settings],
        "ticks": [_short(next(iter(setting.values()), "")) for setting in settings],
        "dev": _counts(arm.dev, shown, cost),
        "test": _counts(arm.test, shown, cost),
    }


def _counts(replayed: Replayed, settings: list[int], cost: CostModel) -> dict[str, dict[str, Any]]:
    counts = replayed.counts
    names = {
        "forwards": "num_draft_forwards",
        "target": "num_target",
        "drafted": "num_drafted",
        "accepted": "num_accepted",
    }
    packed = {short: _packed(replayed.per_prompt(getattr(counts, name)[settings])) for short, name in names.items()}
    if _is_curve(cost):
        extra = _extra(np.arange(replayed.lengths.shape[-1]), cost)
        packed["extra"] = _packed((replayed.per_prompt(replayed.lengths @ extra))[settings])
    return packed


def _packed(values: Array) -> dict[str, str]:
    """Little-endian numbers in base64: unsigned of 16 bits each, or of 32 where one of them needs more; fractions as
    floats of 32 bits.
    """
    is_small = values.max(initial=0) < 2**16
    form = "f4" if np.issubdtype(values.dtype, np.floating) else "u2" if is_small else "u4"
    return {"form": form, "numbers": base64.b64encode(values.astype(f"<{form}").tobytes()).decode()}


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
