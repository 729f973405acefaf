"""Who is ahead in a cell: gains over our best fixed length and over each of transformers' schedules.

    gain      tokens per second over all prompts / of the other arm - 1, with the 95 % interval of the paired bootstrap
              over prompts
    median    of the ratios prompt by prompt, which a prompt on which the machine was disturbed cannot move

Each rival is the arm of its kind that was fastest on the timed prompts themselves: of the fixed lengths that ran, of
the training-free policies, of transformers' constant schedules, and of the target's two ways to run without a draft. It
is a favour to the rival: a lead that is left does not owe it to a badly chosen one. With several cycles a prompt's
tokens and seconds are those of all its cycles, so that a resample takes or leaves them together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decode.policies.registry import POLICIES
from evaluation.bench.schedules import CONSTANT, DEFAULT, HEURISTIC, UNASSISTED
from evaluation.families import ALONE, BASELINE, PRODUCT, TRAINING_FREE
from evaluation.families import family as family_named
from evaluation.gain import Gain, Spent
from evaluation.hierarchies.built import Standing
from evaluation.table import Table

SCHEDULES = (DEFAULT, HEURISTIC, CONSTANT)
SAMPLING_NAMES = {"greedy": "greedy", "sampled": "T=1", "nucleus": "T=0.7, top-p 0.9", "own": "as in the config"}


def standings_of(cell: Mapping[str, Any]) -> list[Standing]:
    """Every arm of a cell.

    Raises:
        ValueError: no fixed length among the arms.
    """
    spent = [_spent(arm) for arm in cell["arms"]]
    groups = {rival: (rival,) for rival in (BASELINE, *SCHEDULES, PRODUCT)} | {
        ALONE: (ALONE, UNASSISTED),
        TRAINING_FREE: tuple(POLICIES.keys() - {"head"}),
    }
    rivals = {}
    for rival, families in groups.items():
        members = [
            spent_by_arm for arm, spent_by_arm in zip(cell["arms"], spent, strict=True) if arm["family"] in families
        ]
        if members:
            rivals[rival] = max(members, key=lambda member: member.tokens_per_s)
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


def _spent(arm: Mapping[str, Any]) -> Spent:
    return Spent(np.array(arm["tokens"]), np.array(arm["seconds"]))


def standing_sheet(cell: Mapping[str, Any], standings: Sequence[Standing]) -> Table:
    """The table of one cell."""
    rivals = [name for name in (BASELINE, *SCHEDULES) if name in standings[0].over]
    rows = [
        {
            "policy": _row_name(standing) + " (foreign head)" * arm["is_foreign"],
            "setting": standing.setting,
            "tokens/s": f"{standing.spent.tokens_per_s:.1f}",
            "alone": f"x{1 + standing.over[ALONE].value:.2f}",
            **{f"over {name_of(rival)}": _gain(standing, rival) for rival in rivals},
        }
        for arm, standing in zip(cell["arms"], standings, strict=True)
    ]
    return Table(
        title_of(cell),
        rows,
        "gain in per cent, its 95 % interval over prompts, and the median of the ratios of prompts; each rival is the "
        "fastest of its kind on these very prompts, the best fixed length and the target alone included",
        names=2,
    )


def _row_name(standing: Standing) -> str:
    """Name of the family; of the fixed lengths, the fastest alone is the best."""
    is_rival = standing.spent is standing.rivals[BASELINE]
    return "fixed length" if standing.family == BASELINE and not is_rival else name_of(standing.family)


def summary_sheet(cells: Sequence[tuple[Mapping[str, Any], Sequence[Standing]]]) -> Table:
    """One row per cell and family of heads: where trained heads stand."""
    known = {rival for _, standings in cells for rival in standings[0].over}
    rivals = {rival: f"over {name_of(rival)}" for rival in (BASELINE, TRAINING_FREE, *SCHEDULES) if rival in known}
    rows = [
        {
            "ratio": f"{ratio_of(cell):.2f}",
            "dataset": cell["dataset"],
            "sampling": SAMPLING_NAMES[cell["sampling"]],
            "policy": name_of(standing.family),
            "setting": standing.setting,
            **{heading: _short(standing.over[rival]) for rival, heading in rivals.items() if rival in standing.over},
        }
        for cell, standings in cells
        for standing in standings
        if family_named(standing.family).needs_training
    ]
    headings = ("ratio", "dataset", "sampling", "policy", "setting", *rivals.values())
    note = "gain in per cent over each rival, and its 95 % interval over prompts"
    return Table("trained heads", rows, note, names=5, headings=headings)


def title_of(cell: Mapping[str, Any]) -> str:
    """Title of a cell: its sampling, its times and its texts."""
    num_prompts = len(cell["arms"][0]["seconds"])
    times = f"t_draft {1e3 * cell['times']['t_draft_s']:.2f} ms, t_target/t_draft {ratio_of(cell):.2f}"
    texts = f"{num_prompts} prompts of {cell['dataset']}, at most {cell['num_tokens']} tokens, {cell['cycles']} times"
    sampling, schedule = SAMPLING_NAMES[cell["sampling"]], cell["default_schedule"]
    return f"{sampling}: {times}; {texts}; default schedule: {schedule}"


def ratio_of(cell: Mapping[str, Any]) -> float:
    """The cell's t_target(0) / t_draft."""
    return float(cell["times"]["t_target_s"][0] / cell["times"]["t_draft_s"])


def verdict_of(cell: Mapping[str, Any], standings: Sequence[Standing]) -> str:
    """Lead of our arm that dev chose over each schedule, and the arms of ours that are behind one.

    Policies that were named have no figures of dev: of them the fastest on the timed prompts is reported as such.
    """
    arms = list(zip(cell["arms"], standings, strict=True))
    ours = [(arm, standing) for arm, standing in arms if standing.family not in (*SCHEDULES, ALONE, UNASSISTED)]
    if on_dev := [(arm, standing) for arm, standing in ours if arm["on_dev"] is not None]:
        how, (_, best) = "dev chose", max(on_dev, key=lambda pair: float(pair[0]["on_dev"]))
    else:
        how = "fastest of the named policies on these very prompts:"
        _, best = max(ours, key=lambda pair: pair[1].spent.tokens_per_s)
    against = ", ".join(f"{_gain(best, name)} % over {name_of(name)}" for name in SCHEDULES if name in best.over)
    behind = [
        f"{name_of(standing.family)} behind {name_of(name)}"
        for _, standing in ours
        for name in SCHEDULES
        if name in standing.over and standing.over[name].value < 0
    ]
    where = f"{cell['dataset']}, {SAMPLING_NAMES[cell['sampling']]} at ratio {ratio_of(cell):.2f}"
    if not against:
        lead = "" if best.family == BASELINE else f", {_short(best.over[BASELINE])} % over the best fixed length"
        return (
            f"{where}: {how} {name_of(best.family)}{lead}; without --race.assistant no schedule of "
            "transformers runs beside it."
        )
    return (
        f"{where}: {how} {name_of(best.family)}: {against}. "
        f"{'Lost: ' + '; '.join(behind) if behind else 'None of ours is behind'}."
    )


def best_of(standings: Sequence[Standing], family: str) -> Standing | None:
    """The fastest arm of a family; None where it did not run."""
    of_family = [standing for standing in standings if standing.family == family]
    return max(of_family, key=lambda standing: standing.spent.tokens_per_s) if of_family else None


def name_of(family: str) -> str:
    """Name of a family or a rival in tables and plots."""
    return f"best {family}" if family == TRAINING_FREE else family_named(family).label


def _gain(standing: Standing, rival: str) -> str:
    gain = standing.over[rival]
    if gain.standard_error == 0:
        return ""
    return f"{_short(gain)} {100 * standing.median_over[rival]:+.1f}"


def _short(gain: Gain) -> str:
    return f"{100 * gain.value:+.1f} ({100 * gain.low:+.0f}, {100 * gain.high:+.0f})"
