"""`acceptance-heads stats`: acceptance of a pair, in numbers and in the plots of SVIP's Figures 2-4 (arXiv 2411.18462).

    KL_i = H(q_i, p_i) - H(q_i)                                 of untruncated temperature-1 distributions
    acceptance_rate_i >= 1 - sqrt(KL_i / 2)                     Pinsker
    acceptance_rate_i >= 1 - sqrt(1 - exp(-KL_i))               Bretagnolle-Huber
    rho = H(q, p) / H(q)                                        one rho for all positions: Pinsker is then
                                                                1 - sqrt(c H(q)), c = (rho - 1) / 2: SVIP's rule

The bounds concern acceptance under those same distributions, so they hold at every position only if the run's
`Sampling` is temperature 1 without truncation. The expected accepted length at i is the sum over k >= i of the product
over j = i … k of acceptance_rate_j, up to the end of the response.
"""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from data_gen.store.errors import account
from data_gen.store.manifest import read_manifest
from data_gen.store.rows import read_rows
from store.shards import check_sums, list_shards, write_atomic

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Positions = dict[str, Array]
"""Name -> number at every response position of a split, [position]: those of the rows, and `accepted_length`, the
expected number of tokens accepted in a row from there."""
_NAMES = ("acceptance_prob", "acceptance_rate", "entropy", "cross_entropy")


def stats(config: Config, *, split: str = "train", plots: bool = True) -> dict[str, Any]:
    """Print a summary of one split, and draw SVIP's plots of it.

    Args:
        split: train, dev or test.
        plots: also draw DIR/stats/SPLIT.png.
    """
    directory = Path(config.data.dir)
    manifest = read_manifest(directory, keys=("sampling",))
    paths = list_shards(directory, split)
    rows = _rows(paths)
    positions, reasons = _positions(rows, paths[0].parent), Counter(map(str, rows.finish_reason))
    summary = summarise(positions) | {
        "rows": len(rows),
        "finish_reason": dict(reasons),
        "sampling": manifest["sampling"],
        **{f"prompts_{name}": count for name, count in account(paths).items()},
        **{f"set {name}": facts for name, facts in _by_set(rows).items()},
    }
    path = directory / "stats" / f"{split}.json"
    write_atomic(path, json.dumps(summary, indent=1).encode())
    for name, value in summary.items():
        print(f"  {name:<28} {value:,.4g}" if isinstance(value, float) else f"  {name:<28} {value}")
    if plots and positions["acceptance_rate"].size:
        from data_gen.figures import draw  # matplotlib takes long to import

        bounds = lower_bounds(positions["entropy"], positions["cross_entropy"])
        draw(positions | {"bound": bounds["bretagnolle_huber"]}, summary, path.with_suffix(".png"))
        print(f"  {path.with_suffix('.png')}")
    print(
        f"The target accepts a drafted token of {split} with probability {summary['acceptance_rate_mean']:.2f} on "
        f"average (all statistics: {path}); next: acceptance-heads train --config …"
    )
    return summary


def _rows(paths: list[Path]) -> "pd.DataFrame":
    import pandas as pd  # takes long to import
    from pyarrow.parquet import read_schema

    check_sums(paths)
    names = [*_NAMES, "finish_reason", *(["set"] if "set" in read_schema(paths[0]).names else [])]
    return pd.concat([read_rows(path, names).to_pandas() for path in paths])


def _positions(rows: "pd.DataFrame", folder: Path) -> Positions:
    """The positions of the rows that have the columns of both models; ValueError if there are none."""
    rows = rows.dropna(subset=["acceptance_rate", "entropy"])
    if rows.empty:
        raise ValueError(
            f"{folder} has no acceptance_rate or entropy (sequential or imported data), which stats need; make the "
            "data with data.mode: together"
        )
    lengths = np.concatenate([accepted_length(rates) for rates in rows.acceptance_rate])
    positions = {name: np.concatenate(rows[name].to_list()).astype(np.float64) for name in _NAMES}
    return positions | {"accepted_length": lengths}


def _by_set(rows: "pd.DataFrame") -> dict[str, dict[str, float | int]]:
    """Rows, tokens and mean acceptance of each set of prompts; empty if there is only one."""
    sets: dict[str, dict[str, float | int]] = {}
    for name, part in rows.groupby("set") if "set" in rows else ():
        sets[str(name)] = {"rows": len(part), "tokens": int(part.acceptance_prob.map(len).sum())}
        for column in ("acceptance_prob", "acceptance_rate"):
            if part[column].notna().all():
                sets[str(name)][column] = float(np.concatenate(part[column].to_list()).mean())
    return sets


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
    has_entropy = entropy > 0.01  # below, the ratio is noise
    return {
        "positions": int(rate.size),
        "acceptance_rate_mean": float(rate.mean()),
        "acceptance_rate_std": float(rate.std()),
        "acceptance_prob_mean": float(positions["acceptance_prob"].mean()),
        "entropy_mean_nats": float(entropy.mean()),
        "cross_entropy_mean_nats": float(cross_entropy.mean()),
        "accepted_length_mean": float(positions["accepted_length"].mean()),
        "corr_sqrt_entropy_rate": float(np.corrcoef(np.sqrt(entropy), rate)[0, 1])
        if rate.size > 1 and rate.std() > 0
        else 0.0,
        "rho_ratio_of_means": rho,
        "rho_median": float(np.median(cross_entropy[has_entropy] / entropy[has_entropy])) if has_entropy.any() else rho,
        "c": (rho - 1) / 2,
        **{f"{name}_violations": float((rate < bound - 1e-4).mean()) for name, bound in bounds.items()},
    }
