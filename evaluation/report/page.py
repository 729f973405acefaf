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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.policies.base import JOINT
from evaluation.clock.results import ClockReport
from evaluation.contest.arms import Arm, Replays
from evaluation.contest.decoded import FAMILIES, DecodedHierarchies
from evaluation.contest.grids import BOUNDS
from evaluation.costs.model import CostModel
from evaluation.figure import Plot
from evaluation.hierarchies.runs import Run
from evaluation.traces.replay import Replayed
from evaluation.traces.trace import Array
from store.shards import write_atomic

MAX_NUMBERS = 400_000
"""Counts of one kind, split and dataset: about 1 MB each in the page."""
RATIOS = (1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 40.0)
"""t_target / t_draft at which the rule of law 4.11 is solved for the page, which cannot solve it itself."""


@dataclass(frozen=True)
class ReportArm:
    """An arm; `ratio` is set for a rule that was solved for one value of t_target / t_draft."""

    arm: Arm
    ratio: float | None = None


@dataclass(frozen=True)
class ReportHierarchy:
    """One hierarchy at every setting that was decoded on both splits."""

    family: str
    settings: tuple[tuple[Run, Run], ...]
    """Settings of (dev, test)."""
    micro_ratio: float
    """t_micro / t_draft, where the page's slider stands at first."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Contents of the page."""

    about: str
    """One line under the title."""
    ratio: float
    """t_target / t_draft where the slider stands at first."""
    stops: Mapping[str, float] = field(default_factory=dict)
    """t_stop / t_draft of each kind of stop; the dearest is where the slider of stops stands at first."""
    datasets: dict[str, Sequence[ReportArm | ReportHierarchy]] = field(default_factory=dict)
    """The arms of each, bounds included; hierarchies get a table of their own."""
    plots: list[Plot] = field(default_factory=list)
    clocks: list[ClockReport] = field(default_factory=list)
    """Report of each dataset's clock, where there was one."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """The rows of batches.csv, where there were batches."""


def report_arms(replays: Replays, cost: CostModel) -> list[ReportArm]:
    """Every arm of a dataset, and the rule solved at several ratios."""
    rules = [
        ReportArm(arm, ratio)
        for ratio in RATIOS
        for arm in replays.auto_arms(cost.with_ratio(ratio), is_online=(False,))
    ]
    return [*map(ReportArm, replays.arms), *rules]


def report_hierarchies(decoded: DecodedHierarchies) -> list[ReportHierarchy]:
    """Each competitor for the page."""
    on_dev = {(run.competitor.name, run.setting.key): run for run in decoded.dev}
    runs: dict[str, list[tuple[Run, Run]]] = {}
    for run in decoded.test:
        runs.setdefault(FAMILIES[run.competitor.name], []).append((on_dev[run.competitor.name, run.setting.key], run))
    return [ReportHierarchy(family, tuple(settings), decoded.micro_ratio) for family, settings in runs.items()]


def write_report(path: Path, page: Page, *, names: Mapping[str, str]) -> None:
    """Write the page; `names` says what it calls each family."""
    data = {
        "names": dict(names),
        "about": page.about,
        "ratio": page.ratio,
        "stop": max(page.stops.values(), default=0.0),
        "datasets": [_dataset(name, entries, page.stops) for name, entries in page.datasets.items()],
        "plots": [_plot(plot) for plot in page.plots],
        "clocks": [_clock(report, names) for report in page.clocks],
        "batches": page.batches,
    }
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # A text that holds </script> would end the page's script.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    write_atomic(path, template.replace("__DATA__", embedded).encode())


def _dataset(name: str, entries: Sequence[ReportArm | ReportHierarchy], stops: Mapping[str, float]) -> dict[str, Any]:
    arms = [entry for entry in entries if isinstance(entry, ReportArm)]
    first = {split: getattr(arms[0].arm, split) for split in ("dev", "test")}
    shapes = {split: replayed.per_prompt(replayed.counts.num_emitted)[0] for split, replayed in first.items()}
    num_settings = sum(len(entry.arm.grid.settings) for entry in arms)
    step = max(1, -(-num_settings * max(map(len, shapes.values())) // MAX_NUMBERS))  # rounded up
    return {
        "name": name,
        **{split: {"rows": len(emitted), "tokens": int(emitted.sum())} for split, emitted in shapes.items()},
        "arms": [_arm(entry, step) | {"stop": _weight(entry.arm.test.stop_kind, stops)} for entry in arms],
        "hierarchies": [_hierarchy(entry) for entry in entries if isinstance(entry, ReportHierarchy)],
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


def _hierarchy(entry: ReportHierarchy) -> dict[str, Any]:
    return {
        "family": entry.family,
        "micro_ratio": entry.micro_ratio,
        "settings": [{"label": test.label, "dev": _totals(dev), "test": _totals(test)} for dev, test in entry.settings],
    }


def _totals(run: Run) -> dict[str, int]:
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


def _arm(entry: ReportArm, step: int) -> dict[str, Any]:
    arm = entry.arm
    shown = list(range(0, len(arm.grid.settings), step))
    settings = [arm.grid.settings[setting] for setting in shown]
    prefix = f"{arm.grid.name.removeprefix('head:')}: " if arm.grid.name.startswith("head:") else ""
    return {
        "family": arm.grid.family,
        "name": arm.grid.name,
        "ratio": entry.ratio,
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
