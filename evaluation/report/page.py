"""report.html: the evaluation as one page that works offline, in which a reader sets the times of their own hardware.

The page holds the replayed counts of every setting on every prompt and recomputes times, dev-chosen settings and
intervals itself (law 4.9), so the ranking follows the sliders: t_target / t_draft, what a verified token adds, what the
dearest stop adds to a draft step. Nothing is fetched from anywhere. Very large grids are thinned to stay under
`MAX_NUMBERS` counts a split. Hierarchies, which are decoded and not replayed, have a table of their own, recomputed
from totals of their three models' forwards. Batches, which the page cannot replay (law 4.13), are shown as evaluated: a
reader picks one of the costs, what a verified token takes, and the batch size.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decode.policies.base import JOINT
from evaluation.clock.results import ClockReport
from evaluation.contest.arms import Arm, Replays
from evaluation.contest.decoded import FAMILIES, DecodedHierarchies
from evaluation.contest.grids import BOUNDS
from evaluation.costs.model import CostModel
from evaluation.figure import Plot
from evaluation.hierarchies.runs import Candidate
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
    ratio: float
    """t_target / t_draft where the slider stands at first."""
    stops: Mapping[str, float] = field(default_factory=dict)
    """t_stop / t_draft of each kind of stop; the dearest is where the slider of stops stands at first."""
    datasets: dict[str, Sequence[Arm]] = field(default_factory=dict)
    """The arms of each, bounds included."""
    hierarchies: dict[str, DecodedHierarchies] = field(default_factory=dict)
    """Those of each dataset, where some were decoded; they get a table of their own."""
    plots: list[Plot] = field(default_factory=list)
    clocks: list[ClockReport] = field(default_factory=list)
    """Report of each dataset's clock, where there was one."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """The rows of batches.csv, where there were batches."""


def report_arms(replays: Replays, cost: CostModel) -> list[Arm]:
    """Every arm of a dataset, and the rule solved at several ratios."""
    rules = [
        replace(arm, ratio=ratio)
        for ratio in RATIOS
        for arm in replays.auto_arms(cost.with_ratio(ratio), is_online=(False,))
    ]
    return [*replays.arms, *rules]


def write_report(path: Path, page: Page, *, names: Mapping[str, str]) -> None:
    """Write the page; `names` says what it calls each family."""
    data = {
        "names": dict(names),
        "about": page.about,
        "ratio": page.ratio,
        "stop": max(page.stops.values(), default=0.0),
        "datasets": [
            _dataset(name, arms, page.stops)
            | {"hierarchies": _hierarchies(page.hierarchies[name]) if name in page.hierarchies else []}
            for name, arms in page.datasets.items()
        ],
        "plots": [_plot(plot) for plot in page.plots],
        "clocks": [_clock(report, names) for report in page.clocks],
        "batches": page.batches,
    }
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # A text that holds </script> would end the page's script.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    write_atomic(path, template.replace("__DATA__", embedded).encode())


def _dataset(name: str, arms: Sequence[Arm], stops: Mapping[str, float]) -> dict[str, Any]:
    first = {split: getattr(arms[0], split) for split in ("dev", "test")}
    shapes = {split: replayed.per_prompt(replayed.counts.num_emitted)[0] for split, replayed in first.items()}
    num_settings = sum(len(arm.grid.settings) for arm in arms)
    step = max(1, -(-num_settings * max(map(len, shapes.values())) // MAX_NUMBERS))  # rounded up
    return {
        "name": name,
        **{split: {"rows": len(emitted), "tokens": int(emitted.sum())} for split, emitted in shapes.items()},
        "arms": [_arm(arm, step) | {"stop": _weight(arm.test.stop_kind, stops)} for arm in arms],
    }


def _weight(kind: str, stops: Mapping[str, float]) -> float:
    """Seconds of a stop in units of the dearest one."""
    parts = (stops.get(part, 0.0) for part in kind.split(JOINT))
    return stops.get(kind, sum(parts)) / (max(stops.values(), default=0.0) or 1.0)


def _plot(plot: Plot) -> dict[str, str]:
    return {"svg": plot.svg, "caption": plot.caption}


def _clock(report: ClockReport, names: Mapping[str, str]) -> dict[str, Any]:
    sheet = report.sheet(names)
    return {
        "title": f"{report.dataset}: {report.about}",
        "columns": sheet.columns,
        "rows": [list(row.values()) for row in sheet.rows],
        "verdict": report.verdict,
        "plot": _plot(report.plot(names)),
    }


def _hierarchies(decoded: DecodedHierarchies) -> list[dict[str, Any]]:
    """Each hierarchy at every setting that was decoded on both splits; the page's slider of t_micro / t_draft stands at
    `micro_ratio` at first.
    """
    on_dev = {(run.competitor.name, run.setting.key): run for run in decoded.dev}
    settings: dict[str, list[dict[str, Any]]] = {}
    for run in decoded.test:
        dev = on_dev[run.competitor.name, run.setting.key]
        shown = {"label": run.label, "dev": _totals(dev), "test": _totals(run)}
        settings.setdefault(FAMILIES[run.competitor.name], []).append(shown)
    return [
        {"family": family, "micro_ratio": decoded.micro_ratio, "settings": settings_of_family}
        for family, settings_of_family in settings.items()
    ]


def _totals(run: Candidate) -> dict[str, int]:
    counts = run.counts
    names = {
        "tokens": "num_emitted",
        "micro": "num_micro_forwards",
        "draft": "num_draft_forwards",
        "target": "num_target",
        "drafted": "num_drafted",
        "accepted": "num_accepted",
    }
    return {"prompts": len(run.decoded), **{short: int(getattr(counts, name)) for short, name in names.items()}}


def _arm(arm: Arm, step: int) -> dict[str, Any]:
    shown = list(range(0, len(arm.grid.settings), step))
    settings = [arm.grid.settings[setting] for setting in shown]
    prefix = f"{arm.grid.name.removeprefix('head:')}: " if arm.grid.name.startswith("head:") else ""
    return {
        "family": arm.grid.family,
        "name": arm.grid.name,
        "ratio": arm.ratio,
        "bound": arm.grid.family in BOUNDS,
        "settings": [
            prefix + (", ".join(f"{key} = {_short(value)}" for key, value in setting.items()) or "-")
            for setting in settings
        ],
        "ticks": [_short(next(iter(setting.values()), "")) for setting in settings],
        "dev": _counts(arm.dev, shown),
        "test": _counts(arm.test, shown),
    }


def _counts(replayed: Replayed, settings: list[int]) -> dict[str, dict[str, Any]]:
    counts = replayed.counts
    names = {
        "forwards": "num_draft_forwards",
        "target": "num_target",
        "drafted": "num_drafted",
        "accepted": "num_accepted",
    }
    return {short: _packed(replayed.per_prompt(getattr(counts, name)[settings])) for short, name in names.items()}


def _packed(values: Array) -> dict[str, Any]:
    """Little-endian unsigned numbers in base64, of 16 bits each, or of 32 where one of them needs more."""
    bits = 16 if values.max(initial=0) < 2**16 else 32
    return {"bits": bits, "numbers": base64.b64encode(values.astype(f"<u{bits // 8}").tobytes()).decode()}


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
