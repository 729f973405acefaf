"""`acceptance-heads stats`: acceptance of a pair, in numbers and in the plots of SVIP's Figures 2-4 (arXiv 2411.18462).

    KL_i = H(q_i, p_i) - H(q_i)                                 of untruncated temperature-1 distributions
    acceptance_rate_i >= 1 - sqrt(KL_i / 2)                     Pinsker
    acceptance_rate_i >= 1 - sqrt(1 - exp(-KL_i))               Bretagnolle-Huber
    rho = H(q, p) / H(q)                                        one rho for all positions: Pinsker is then
                                                                1 - sqrt(c H(q)), c = (rho - 1) / 2: SVIP's rule

The bounds concern acceptance under those same distributions, so they hold at every position only if the run's
`Sampling` is temperature 1 without truncation. The expected accepted length at i is the sum over k >= i of the
product over j = i … k of acceptance_rate_j, up to the end of the response.
"""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from configs.hints import say_next
from configs.load import accepts_yaml
from configs.schema import Config
from data_gen.store.manifest import read_manifest
from data_gen.store.rows import account, read_rows
from store.shards import check_sums, list_shards, write_atomic

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Positions = dict[str, Array]
"""Name -> number at every response position of a split: those of the rows, and the expected `accepted_length` from it.
"""
_BLUE, _ORANGE = "#1f5fa8", "#d95f02"
_NUM_BINS = 20
_FEWEST = 5
_MIN_ENTROPY = 0.01
"""Below it, the ratio of entropies is noise."""
_NAMES = ("acceptance_prob", "acceptance_rate", "entropy", "cross_entropy")
_LABELS = {
    "acceptance_rate_mean": "acceptance rate, mean",
    "acceptance_rate_std": "acceptance rate, standard deviation",
    "acceptance_prob_mean": "acceptance probability of drafted tokens, mean",
    "entropy_mean_nats": "entropy H(q), mean in nats",
    "cross_entropy_mean_nats": "cross-entropy H(q, p), mean in nats",
    "accepted_length_mean": "length of accepted runs, mean in tokens",
    "corr_sqrt_entropy_rate": "correlation of sqrt H(q) and acceptance rate",
    "rho_ratio_of_means": "H(q, p) / H(q), ratio of means",
    "rho_median": "H(q, p) / H(q), median",
    "c": "SVIP's constant c, (H(q, p) / H(q) - 1) / 2",
    "pinsker_violations": "share of positions below Pinsker's bound",
    "bretagnolle_huber_violations": "share below the Bretagnolle-Huber bound",
    "finish_reason": "finish reason of responses",
    "prompts_tokens": "response tokens",
}
"""Name of a statistic in stats/SPLIT.json -> what the console calls it; other names are plain."""


@accepts_yaml
def stats(config: Config, *, split: str = "train", plots: bool = True) -> dict[str, Any]:
    """Run `acceptance-heads stats`; `configs.making` documents its flags."""
    manifest = read_manifest(config.data.dir, keys=("sampling",))
    paths = list_shards(config.data.dir, split)
    rows = _rows(paths)
    positions = _positions(rows, paths[0].parent)
    summary = summarise(positions) | {
        "rows": len(rows),
        "finish_reason": dict(Counter(map(str, rows.finish_reason))),
        "sampling": manifest["sampling"],
        **{f"prompts_{name}": count for name, count in account(paths)[0].items()},
        **{f"set {name}": facts for name, facts in _by_set(rows).items()},
    }
    path = Path(config.data.dir, "stats", f"{split}.json")
    write_atomic(path, json.dumps(summary, indent=1).encode())
    width = max(map(len, _LABELS.values()))
    for name, value in summary.items():
        print(f"  {_LABELS.get(name, name.replace('_', ' ')):<{width}}  {_text(value)}")
    if plots and positions["acceptance_rate"].size:
        _draw(positions, summary, path.with_suffix(".png"))
        print(f"  {path.with_suffix('.png')}")
    print(
        f"The target accepts a drafted token of {split} with probability {summary['acceptance_rate_mean']:.2f} on "
        f"average (all statistics: {path})"
    )
    say_next(config, "train")
    return summary


def _text(value: object) -> str:
    """A statistic, or several with their names, for the console; what is null is left out."""
    if isinstance(value, dict):
        known = {key: part for key, part in value.items() if part is not None}
        return ", ".join(f"{key.replace('_', ' ')} {_text(part)}" for key, part in known.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _rows(paths: list[Path]) -> "pd.DataFrame":
    import pandas as pd  # takes long to import
    from pyarrow.parquet import read_schema

    check_sums(paths)
    names = [*_NAMES, "finish_reason", *(["set"] if "set" in read_schema(paths[0]).names else [])]
    return pd.concat([read_rows(path, names).to_pandas() for path in paths])


def _positions(rows: "pd.DataFrame", folder: Path) -> Positions:
    rows = rows.dropna(subset=["acceptance_rate", "entropy"])
    if rows.empty:
        raise ValueError(f"{folder} has no acceptance_rate or entropy; make the data with data.mode: together")
    positions = {name: np.concatenate(rows[name].to_list()).astype(np.float64) for name in _NAMES}
    return positions | {"accepted_length": np.concatenate([accepted_length(rates) for rates in rows.acceptance_rate])}


def _by_set(rows: "pd.DataFrame") -> dict[str, dict[str, float | int]]:
    """Rows, tokens and mean acceptance of each set of prompts; empty if there is only one."""
    return {
        str(name): {"rows": len(part), "tokens": int(part.acceptance_prob.map(len).sum())}
        | {
            column: float(np.concatenate(part[column].to_list()).mean())
            for column in ("acceptance_prob", "acceptance_rate")
            if part[column].notna().all()
        }
        for name, part in (rows.groupby("set") if "set" in rows else ())
    }


def lower_bounds(entropy: Array, cross_entropy: Array) -> dict[str, Array]:
    """Lower bounds of acceptance_rate: `pinsker`, which may be negative, and `bretagnolle_huber`, in [0, 1]."""
    divergence = np.maximum(cross_entropy - entropy, 0.0)  # tiny negatives come from rounding
    return {"pinsker": 1 - np.sqrt(divergence / 2), "bretagnolle_huber": 1 - np.sqrt(-np.expm1(-divergence))}


def accepted_length(acceptance_rate: NDArray[np.floating]) -> Array:
    """L_i = a_i (1 + L_{i+1}): the expected length of the accepted run that starts at each position of one response."""
    lengths = np.zeros(len(acceptance_rate) + 1)
    for index in range(len(acceptance_rate) - 1, -1, -1):
        lengths[index] = acceptance_rate[index] * (1 + lengths[index + 1])
    return lengths[:-1]


def summarise(positions: Positions) -> dict[str, Any]:
    """Means, correlations, rho, c, and the share of positions below each bound (0 at temperature 1, untruncated)."""
    rate, entropy, cross_entropy = (positions[name] for name in ("acceptance_rate", "entropy", "cross_entropy"))
    bounds = lower_bounds(entropy, cross_entropy)
    rho = float(cross_entropy.sum() / max(entropy.sum(), 1e-12))
    has_entropy = entropy > _MIN_ENTROPY
    has_spread = rate.size > 1 and rate.std() > 0
    return {
        "positions": int(rate.size),
        "acceptance_rate_mean": float(rate.mean()),
        "acceptance_rate_std": float(rate.std()),
        "acceptance_prob_mean": float(positions["acceptance_prob"].mean()),
        "entropy_mean_nats": float(entropy.mean()),
        "cross_entropy_mean_nats": float(cross_entropy.mean()),
        "accepted_length_mean": float(positions["accepted_length"].mean()),
        "corr_sqrt_entropy_rate": float(np.corrcoef(np.sqrt(entropy), rate)[0, 1]) if has_spread else 0.0,
        "rho_ratio_of_means": rho,
        "rho_median": float(np.median(cross_entropy[has_entropy] / entropy[has_entropy])) if has_entropy.any() else rho,
        "c": (rho - 1) / 2,
        **{f"{name}_violations": float((rate < bound - 1e-4).mean()) for name, bound in bounds.items()},
    }


def _draw(positions: Positions, summary: dict[str, Any], path: Path) -> None:
    """Write SVIP's Figures 2, 3 and 4 as three panels."""
    from matplotlib.figure import Figure  # takes long to import

    figure = Figure(figsize=(16, 4.5), layout="constrained")
    axes = [figure.add_subplot(1, 3, number) for number in (1, 2, 3)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    rate, entropy, cross_entropy = (positions[name] for name in ("acceptance_rate", "entropy", "cross_entropy"))
    _draw_entropy(axes[0], entropy, rate, summary["c"])
    _draw_ratio(axes[1], cross_entropy, entropy, summary)
    # acceptance against its lower bound, which holds above the diagonal
    bound = lower_bounds(entropy, cross_entropy)["bretagnolle_huber"]
    axes[2].hexbin(bound, rate, gridsize=50, bins="log", cmap="Blues", mincnt=1, lw=0.1)
    axes[2].plot([0, 1], [0, 1], color=_ORANGE, lw=1)
    below = f"{summary['bretagnolle_huber_violations']:.2%} of positions below the bound"
    axes[2].set(title=below, xlabel="Bretagnolle-Huber bound", ylabel="acceptance_rate")
    sampling = ", ".join(f"{name} {value}" for name, value in summary["sampling"].items() if value is not None)
    if sampling != "temperature 1.0":
        figure.supxlabel(f"acceptance under {sampling}; entropies and bounds at temperature 1", fontsize=8)
    figure.savefig(path, dpi=120)


def _draw_entropy(axis: "Axes", entropy: Array, rate: Array, c: float) -> None:
    """Acceptance by draft entropy: mean and quartiles of equal-width bins."""
    edges = np.linspace(0, max(float(np.quantile(entropy, 0.999)), 1e-9), _NUM_BINS + 1)
    index = np.clip(np.digitize(entropy, edges) - 1, 0, _NUM_BINS - 1)
    filled = [number for number in range(_NUM_BINS) if (index == number).sum() >= _FEWEST]
    bins = [rate[index == number] for number in filled]
    centres = ((edges[:-1] + edges[1:]) / 2)[filled]
    lower, upper = ([np.quantile(part, share) for part in bins] for share in (0.25, 0.75))
    axis.fill_between(centres, lower, upper, color=_BLUE, alpha=0.2, lw=0, label="quartiles")
    axis.plot(centres, [part.mean() for part in bins], color=_BLUE, marker="o", ms=3, label="mean")
    grid = np.linspace(0, entropy.max(), 200)
    svip = np.maximum(0, 1 - np.sqrt(max(c, 0) * grid))
    axis.plot(grid, svip, color=_ORANGE, ls="--", label=f"1 - sqrt({c:.2f} H)")
    axis.set(title="Acceptance by draft entropy", xlabel="H(q), nats", ylabel="acceptance_rate", ylim=(0, 1.02))
    axis.legend(frameon=False)


def _draw_ratio(axis: "Axes", cross_entropy: Array, entropy: Array, summary: dict[str, Any]) -> None:
    has_entropy = entropy > _MIN_ENTROPY
    ratio = cross_entropy[has_entropy] / entropy[has_entropy]
    highest = float(np.quantile(ratio, 0.97))  # the tail is long; it is drawn as one bar
    axis.hist(np.minimum(ratio, highest), bins=np.linspace(1, max(highest, 1.01), 60).tolist(), color=_BLUE, alpha=0.7)
    label = f"ratio of means {summary['rho_ratio_of_means']:.2f}, so c = {summary['c']:.2f}"
    axis.axvline(summary["rho_ratio_of_means"], color=_ORANGE, label=label)
    axis.axvline(1.3, color="#777777", ls=":", label="SVIP: 1.3, so c = 0.15")
    axis.set(title="Cross-entropy over entropy", xlabel="H(q, p) / H(q), where H(q) > 0.01", ylabel="positions")
    axis.legend(frameon=False)
