"""Who is ahead in a cell: gains over our best fixed length and over each of transformers' schedules.

    gain      tokens per second over all prompts / of the other arm - 1, with the 95 % interval of the paired bootstrap
              over prompts
    median    of the ratios prompt by prompt, which a prompt on which the machine was disturbed cannot move

The best fixed length and the best training-free policy are those that dev chose, or of those that were named the
fastest on the timed prompts; the best constant schedule is the fastest on the timed prompts: a favour to transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decode.policies.registry import POLICIES
from evaluation.bench.schedules import CONSTANT, DEFAULT, HEURISTIC
from evaluation.competitors import Standing
from evaluation.contest.arms import ALONE, BASELINE
from evaluation.contest.results import TRAINING_FREE
from evaluation.contest.tables import NAMES
from evaluation.figure import GREY, Plot, panels_of, plot_of
from evaluation.intervals import Gain, Spent
from evaluation.sheet import Sheet

SCHEDULES = (DEFAULT, HEURISTIC, CONSTANT)
_LABELS = {"greedy": "greedy", "sampled": "T=1", "nucleus": "T=0.7, top-p 0.9", "own": "as in the config"}


def standings_of(cell: Mapping[str, Any]) -> list[Standing]:
    """Every arm of a cell.

    Raises:
        ValueError: no fixed length among the arms.
    """
    spent = [_spent(arm, cell["num_tokens"]) for arm in cell["arms"]]
    groups = {rival: (rival,) for rival in (BASELINE, ALONE, *SCHEDULES)} | {
        TRAINING_FREE: tuple(POLICIES.keys() - {"head"})
    }
    rivals = {}
    for rival, families in groups.items():
        members = [
            (arm.get("on_dev") or spent_by_arm.tokens_per_s, spent_by_arm)
            for arm, spent_by_arm in zip(cell["arms"], spent, strict=True)
            if arm["family"] in families
        ]
        if members:
            rivals[rival] = max(members, key=lambda member: member[0])[1]
    if BASELINE not in rivals:
        raise ValueError(
            "no policy is a fixed length, which gains are measured from; name at least one, as fixed_length:k=5"
        )
    return [
        Standing(family=arm["family"], setting=arm["setting"], spent=spent_by_arm, rivals=rivals)
        for arm, spent_by_arm in zip(cell["arms"], spent, strict=True)
    ]


def records_of(cell: Mapping[str, Any], standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """The arms of a cell as JSON has them."""
    return [
        {
            "family": standing.family,
            "setting": standing.setting,
            "is_foreign": arm["is_foreign"],
            "tokens_per_s": standing.spent.tokens_per_s,
            "over": {name: gain._asdict() for name, gain in standing.over.items()},
            "median_over": standing.median_over,
        }
        for arm, standing in zip(cell["arms"], standings, strict=True)
    ]


def _spent(arm: Mapping[str, Any], num_tokens: int) -> Spent:
    seconds = np.array(arm["seconds"])
    return Spent(np.full(len(seconds), num_tokens), seconds)


def standing_sheet(cell: Mapping[str, Any], standings: Sequence[Standing]) -> Sheet:
    """The table of one cell."""
    rivals = [name for name in (BASELINE, *SCHEDULES) if name in standings[0].over]
    rows = [
        {
            "policy": _name(standing.family) + " (foreign head)" * arm["is_foreign"],
            "setting": standing.setting,
            "tokens/s": f"{standing.spent.tokens_per_s:.1f}",
            "alone": f"x{1 + standing.over[ALONE].value:.2f}",
            **{f"over {_name(rival)}": _gain(standing, rival) for rival in rivals},
        }
        for arm, standing in zip(cell["arms"], standings, strict=True)
    ]
    return Sheet(
        title_of(cell),
        rows,
        "gain in per cent, its 95 % interval over prompts, and the median of the ratios of prompts",
        names=2,
    )


def summary_sheet(cells: Sequence[tuple[Mapping[str, Any], Sequence[Standing]]]) -> Sheet:
    """One row per cell and family of heads: where trained heads stand."""
    rivals = {rival: f"over {_name(rival)}" for rival in (BASELINE, TRAINING_FREE, *SCHEDULES)}
    rows = [
        {
            "ratio": f"{ratio_of(cell):.2f}",
            "sampling": _LABELS[cell["sampling"]],
            "policy": _name(standing.family),
            "setting": standing.setting,
            **{heading: _short(standing.over[rival]) for rival, heading in rivals.items() if rival in standing.over},
        }
        for cell, standings in cells
        for standing in standings
        if standing.family.startswith(("head_", "auto_"))
    ]
    headings = ("ratio", "sampling", "policy", "setting", *rivals.values())
    note = "gain in per cent over each rival, and its 95 % interval over prompts"
    return Sheet("trained heads", rows, note, names=4, headings=headings)


def title_of(cell: Mapping[str, Any]) -> str:
    """Title of a cell: its sampling, its times and its texts."""
    speed, num_prompts = cell["speed"], len(cell["arms"][0]["seconds"])
    times = f"t_draft {1e3 * speed['t_draft_s']:.2f} ms, t_target/t_draft {ratio_of(cell):.2f}"
    texts = f"{num_prompts} prompts of {cell['num_tokens']} tokens"
    layers = f"extra layers {speed['draft_layers']} and {speed['target_layers']}"
    return f"{_LABELS[cell['sampling']]}: {times} ({layers}); {texts}; default schedule: {cell['default_schedule']}"


def ratio_of(cell: Mapping[str, Any]) -> float:
    """The cell's t_target(0) / t_draft."""
    return float(cell["speed"]["t_target_s"][0] / cell["speed"]["t_draft_s"])


def verdict_of(cell: Mapping[str, Any], standings: Sequence[Standing]) -> str:
    """Lead of our fastest arm over each schedule, and the arms of ours that are behind one."""
    drafting = [standing for standing in standings if standing.family not in (*SCHEDULES, ALONE)]
    best = max(drafting, key=lambda standing: standing.spent.tokens_per_s)
    against = ", ".join(f"{_gain(best, name)} % over {_name(name)}" for name in SCHEDULES if name in best.over)
    behind = [
        f"{_name(standing.family)} behind {_name(name)}"
        for standing in drafting
        for name in SCHEDULES
        if name in standing.over and standing.over[name].value < 0
    ]
    where = f"{_LABELS[cell['sampling']]} at ratio {ratio_of(cell):.2f}"
    if not against:
        return f"{where}: fastest of ours {_name(best.family)}; transformers has no schedule for a feature draft."
    return (
        f"{where}: fastest of ours {_name(best.family)}: {against}. "
        f"{'Lost: ' + '; '.join(behind) if behind else 'None of ours is behind'}."
    )


def race_plot(cells: Sequence[tuple[Mapping[str, Any], Sequence[Standing]]]) -> Plot:
    """Gain over the best fixed length against the ratio of times, one panel per sampling, one line per family."""
    samplings = list(dict.fromkeys(cell["sampling"] for cell, _ in cells))
    figure, panels = panels_of(len(samplings), width=4.4 * len(samplings), height=4.2)
    for axes, sampling in zip(panels, samplings, strict=True):
        of_sampling = sorted(
            (entry for entry in cells if entry[0]["sampling"] == sampling), key=lambda entry: ratio_of(entry[0])
        )
        ratios = [ratio_of(cell) for cell, _ in of_sampling]
        for place, family in enumerate(
            dict.fromkeys(standing.family for _, standings in of_sampling for standing in standings)
        ):
            if family in (BASELINE, ALONE):
                continue
            gains = [_best(standings, family) for _, standings in of_sampling]
            points = np.array([(np.nan,) * 3 if gain is None else (gain.value, gain.low, gain.high) for gain in gains])
            errors = np.maximum(0, np.stack([points[:, 0] - points[:, 1], points[:, 2] - points[:, 0]]))
            style = "--" if family in SCHEDULES else "-"
            shifted = np.array(ratios) * 1.01**place  # so that whiskers stand side by side
            axes.errorbar(
                shifted, 100 * points[:, 0], 100 * errors, fmt=f"{style}.", linewidth=1, capsize=2, label=_name(family)
            )
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set(xscale="log", xlabel="t_target / t_draft", title=_LABELS[sampling])
        axes.set_xticks(ratios, [f"{ratio:.3g}" for ratio in ratios], minor=False)
        axes.minorticks_off()
    panels[0].set_ylabel("gain over the best fixed length, %")
    panels[-1].legend(fontsize=6)
    return plot_of("bench", "Gain over the best fixed length on a clock; whiskers: 95 %.", figure)


def _best(standings: Sequence[Standing], family: str) -> Gain | None:
    of_family = [standing for standing in standings if standing.family == family]
    return max(of_family, key=lambda standing: standing.spent.tokens_per_s).over[BASELINE] if of_family else None


def _name(family: str) -> str:
    return f"best {family}" if family == TRAINING_FREE else NAMES.get(family, family)


def _gain(standing: Standing, rival: str) -> str:
    gain = standing.over[rival]
    if gain.standard_error == 0:
        return ""
    return f"{_short(gain)} {100 * standing.median_over[rival]:+.1f}"


def _short(gain: Gain) -> str:
    return f"{100 * gain.value:+.1f} ({100 * gain.low:+.0f}, {100 * gain.high:+.0f})"
