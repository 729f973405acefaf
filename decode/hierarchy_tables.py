"""The tables of `decode hierarchy`: HSDDW's Table 2 (ablation), its Table 4 (sigma, eta, speed-up), and the plane of cost ratios."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from rich.table import Column, Table

from decode.hierarchy_costs import Times, redundancy, target_utilisation

if TYPE_CHECKING:
    from decode.hierarchy import Run

_ABLATION = {
    "sd": (False, False),
    "sd + pre-verify": (True, False),
    "sd + self-verify": (False, True),
    "sd + pre-verify + self-verify": (True, True),
    "HSDDW": (True, True),
}
"""arm -> (pre-verify, self-verify), the rows of Table 2; HSDDW also loops back."""
_DRAFT_RATIOS = (0.05, 0.1, 0.2, 0.4)
"""t_draft / t_target."""
_MICRO_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""t_micro / t_draft."""
_RESAMPLES = 1000


def arms_frame(runs: "Sequence[Run]", times: Times, given: Times) -> pd.DataFrame:
    """One row per arm: counts of three models, sigma, eta, measured and modelled speed-ups. The first run is the target alone."""
    return pd.DataFrame([_row(run, runs[0], times, given) for run in runs])


def gain_frame(runs: "Sequence[Run]") -> pd.DataFrame:
    """Modelled speed-up of the best plain speculation and of the best hierarchy, each over all its settings, at many ratios of times."""
    rows = []
    for draft_ratio in _DRAFT_RATIOS:
        for micro_ratio in _MICRO_RATIOS:
            times = Times(t_micro_s=micro_ratio * draft_ratio, t_draft_s=draft_ratio, t_target_s=1.0)
            plain, hierarchical = (
                max((times.speedup(run.counts), f"{run.arm.name} {run.label}".strip()) for run in runs if run.arm.num_levels in levels)
                for levels in ((1, 2), (3,))
            )
            rows.append(
                {
                    "draft_ratio": draft_ratio,
                    "micro_ratio": micro_ratio,
                    "plain_speedup": plain[0],
                    "hierarchy_speedup": hierarchical[0],
                    "gain": hierarchical[0] / plain[0] - 1,
                    "plain": plain[1],
                    "hierarchy": hierarchical[1],
                }
            )
    return pd.DataFrame(rows)


def ablation_table(frame: pd.DataFrame) -> Table:
    """HSDDW's Table 2."""
    table = Table(
        "", "pre-verify", "self-verify", *_right("speed-up measured", "modelled", "at given ratios"), title="ablation (HSDDW, Table 2)"
    )
    rows = frame.set_index("arm")
    for name, (pre, own) in _ABLATION.items():
        row = rows.loc[name]
        speeds = (f"{row[key]:.3f}" for key in ("speedup", "speedup_modelled", "speedup_at_ratios"))
        table.add_row(name, "x" if pre else "", "x" if own else "", *speeds)
    return table


def arms_table(frame: pd.DataFrame, times: Times, given: Times, *, num_prompts: int) -> Table:
    """HSDDW's Table 4, for every arm."""
    t_micro, t_draft, t_target = (1e3 * time for time in (times.t_micro_s, times.t_draft_s, times.t_target_s))
    title = (
        f"{num_prompts} test prompts; fitted t_micro {t_micro:.2f}, t_draft {t_draft:.2f}, t_target {t_target:.2f} ms per forward, "
        f"R² {times.r2:.3f}; last column at {given.t_micro_s:g} : {given.t_draft_s:g} : 1"
    )
    names = (
        "N",
        "N_micro",
        "N_draft",
        "N_target",
        "F_micro",
        "F_draft",
        "sigma %",
        "eta %",
        "tok/s",
        "speed-up",
        "90 %",
        "modelled",
        "given",
    )
    table = Table("drafter", "setting", *_right(*names), title=title)
    for row in frame.to_dict("records"):
        counts = (
            str(row[key]) for key in ("num_emitted", "num_micro", "num_drafted", "num_target", "num_micro_forwards", "num_draft_forwards")
        )
        rates = (f"{100 * row[key]:.2f}" for key in ("redundancy", "target_utilisation"))
        interval = f"{row['speedup_low']:.2f}-{row['speedup_high']:.2f}"
        speeds = (f"{row['speedup']:.3f}", interval, f"{row['speedup_modelled']:.3f}", f"{row['speedup_at_ratios']:.3f}")
        table.add_row(row["arm"], row["setting"], *counts, *rates, f"{row['tokens_per_s']:.0f}", *speeds)
    return table


def gain_table(gain: pd.DataFrame) -> Table:
    """Gain of the best hierarchy over the best plain speculation, in per cent."""
    title = "best hierarchy over best plain speculation, modelled, each at its best setting; columns: t_micro / t_draft"
    table = Table("t_draft / t_target", *_right(*(f"{ratio:g}" for ratio in _MICRO_RATIOS)), title=title)
    for draft_ratio, group in gain.groupby("draft_ratio"):
        table.add_row(f"{draft_ratio:g}", *(f"{100 * value:+.1f} %" for value in group["gain"]))
    return table


def verdict(frame: pd.DataFrame, gain: pd.DataFrame, times: Times) -> str:
    """What the figures say, in words."""
    plain, hierarchical = (frame[mask].nlargest(1, "speedup").iloc[0] for mask in (frame["num_levels"] == 2, frame["num_levels"] == 3))
    here = hierarchical["speedup"] / plain["speedup"] - 1
    micro_ratio, draft_ratio = (time / times.t_target_s for time in (times.t_micro_s, times.t_draft_s))
    lines = [
        f"Here (t_micro : t_draft : t_target = {micro_ratio:.3f} : {draft_ratio:.3f} : 1) the best hierarchy, {hierarchical['arm']} "
        f"{hierarchical['setting']}, is {100 * here:+.1f} % against the best plain speculation, {plain['arm']} {plain['setting']}."
    ]
    for draft_ratio, group in gain.groupby("draft_ratio"):
        paying = ", ".join(f"{ratio:g}" for ratio in group[group["gain"] > 0]["micro_ratio"])
        where = f"pays at t_micro / t_draft = {paying}" if paying else "pays at no micro ratio tried"
        lines.append(f"With t_draft / t_target = {draft_ratio:g} a third level {where}; best gain {100 * group['gain'].max():+.1f} %.")
    return "\n".join(lines)


def _row(run: "Run", alone: "Run", times: Times, given: Times) -> dict[str, object]:
    counts = run.counts
    low, high = _interval(run, alone)
    return {
        "arm": run.arm.name,
        "setting": run.label,
        "num_levels": run.arm.num_levels,
        **{key: int(value) for key, value in vars(counts).items()},
        "redundancy": redundancy(counts),
        "target_utilisation": target_utilisation(counts),
        "acceptance_length": counts.acceptance_length,
        "tokens_per_s": counts.num_emitted / sum(run.seconds),
        "speedup": _speed(run, slice(None)) / _speed(alone, slice(None)),
        "speedup_low": low,
        "speedup_high": high,
        "speedup_modelled": times.speedup(counts),
        "speedup_at_ratios": given.speedup(counts),
    }


def _speed(run: "Run", picked: "slice | np.ndarray") -> float:
    """Tokens per second over some of the prompts."""
    tokens = np.array([len(generation.token_ids) for generation in run.generations])
    return float(tokens[picked].sum() / np.array(run.seconds)[picked].sum())


def _interval(run: "Run", alone: "Run") -> tuple[float, float]:
    """90 % bootstrap interval of the speed-up over prompts."""
    draws = np.random.default_rng(0).integers(len(run.generations), size=(_RESAMPLES, len(run.generations)))
    low, high = np.quantile([_speed(run, picked) / _speed(alone, picked) for picked in draws], [0.05, 0.95])
    return float(low), float(high)


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right", no_wrap=True) for name in names]
