"""report.html: the evaluation as one page that works offline, in which a reader sets t_target / t_draft for their own hardware.

The page holds the replayed counts of every setting on every prompt and recomputes times, dev-chosen settings and intervals itself (law
4.9), so the ranking follows the slider. Nothing is fetched from anywhere. Very large grids are thinned to stay under `MAX_NUMBERS` counts
a split. Hierarchies, which are decoded and not replayed, have a table of their own, recomputed from totals of their three models' forwards.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_gen.store.shards import write_atomic
from decode.evaluation.decoded import FAMILIES, DecodedHierarchies
from decode.evaluation.plots import Plot
from decode.evaluation.results import Arm
from decode.hierarchies.runs import Run
from decode.traces.replay import Replayed

MAX_NUMBERS = 400_000
"""Counts of one kind, split and dataset: about 1 MB each in the page."""
BOUNDS = ("perfect_fed", "perfect_drawn", "oracle")


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
    """(dev, test)"""
    micro_ratio: float
    """t_micro / t_draft, where the page's slider stands at first."""


def report_hierarchies(decoded: DecodedHierarchies) -> list[ReportHierarchy]:
    """Each arm for the page."""
    on_dev = {(run.arm.name, run.setting.key): run for run in decoded.dev}
    runs: dict[str, list[tuple[Run, Run]]] = {}
    for run in decoded.test:
        runs.setdefault(FAMILIES[run.arm.name], []).append((on_dev[run.arm.name, run.setting.key], run))
    return [ReportHierarchy(family, tuple(settings), decoded.micro_ratio) for family, settings in runs.items()]


def write_report(
    path: Path,
    datasets: Mapping[str, Sequence[ReportArm | ReportHierarchy]],
    *,
    names: Mapping[str, str],
    about: str,
    ratio: float,
    plots: Sequence[Plot],
) -> None:
    """Write the page.

    Args:
        datasets: the arms of each, bounds included; hierarchies get a table of their own.
        names: family -> what the page calls it.
        about: one line under the title.
        ratio: where the slider stands at first.
        plots: to show below.
    """
    data = {
        "names": dict(names),
        "about": about,
        "ratio": ratio,
        "datasets": [_dataset(name, arms) for name, arms in datasets.items()],
        "plots": [{"svg": plot.svg, "caption": plot.caption} for plot in plots],
    }
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    write_atomic(path, template.replace("__DATA__", embedded).encode())


def _dataset(name: str, entries: Sequence[ReportArm | ReportHierarchy]) -> dict[str, Any]:
    arms = [entry for entry in entries if isinstance(entry, ReportArm)]
    shapes = {split: getattr(arms[0].arm, split).counts.num_emitted[0] for split in ("dev", "test")}
    num_settings = sum(len(entry.arm.grid.settings) for entry in arms)
    step = max(1, -(-num_settings * max(map(len, shapes.values())) // MAX_NUMBERS))
    return {
        "name": name,
        **{split: {"rows": len(emitted), "tokens": int(emitted.sum())} for split, emitted in shapes.items()},
        "arms": [_arm(entry, step) for entry in arms],
        "hierarchies": [_hierarchy(entry) for entry in entries if isinstance(entry, ReportHierarchy)],
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
    kept = list(range(0, len(arm.grid.settings), step))
    settings = [arm.grid.settings[setting] for setting in kept]
    prefix = f"{arm.grid.name.removeprefix('head:')}: " if arm.grid.name.startswith("head:") else ""
    return {
        "family": arm.grid.family,
        "name": arm.grid.name,
        "ratio": entry.ratio,
        "bound": arm.grid.family in BOUNDS,
        "settings": [prefix + (", ".join(f"{key} = {_short(value)}" for key, value in setting.items()) or "-") for setting in settings],
        "ticks": [_short(next(iter(setting.values()), "")) for setting in settings],
        "dev": _counts(arm.dev, kept),
        "test": _counts(arm.test, kept),
    }


def _counts(replayed: Replayed, kept: list[int]) -> dict[str, str]:
    counts = replayed.counts
    names = {"forwards": "num_draft_forwards", "target": "num_target", "drafted": "num_drafted", "accepted": "num_accepted"}
    return {short: _packed(getattr(counts, name)[kept]) for short, name in names.items()}


def _packed(values: np.ndarray) -> str:
    """Little-endian unsigned 16-bit numbers in base64: a generation has fewer than 65,536 tokens of each kind."""
    if values.max(initial=0) >= 2**16:
        raise ValueError(f"a count of {values.max()} on one prompt is more than the report holds; lower decode.max_new_tokens")
    return base64.b64encode(values.astype("<u2").tobytes()).decode()


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
