"""Acceptance of a pair at each position, and the lower bounds of SVIP (arXiv 2411.18462).

    KL_i = H(q_i, p_i) - H(q_i)                                 of untruncated temperature-1 distributions
    acceptance_rate_i >= 1 - sqrt(KL_i / 2)                     Pinsker
    acceptance_rate_i >= 1 - sqrt(1 - exp(-KL_i))               Bretagnolle-Huber
    rho = H(q, p) / H(q)                                        one rho for all positions: Pinsker is then
                                                                1 - sqrt(c H(q)), c = (rho - 1) / 2: SVIP's rule

The bounds concern acceptance under those same distributions, so they hold at every position only if the run's
`Sampling` is temperature 1 without truncation. The expected accepted length at i is the sum over k >= i of the product
over j = i … k of acceptance_rate_j, up to the end of the response.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyarrow.parquet import read_schema

from data_gen.store.rows import read_rows
from store.shards import check_sums

Array = NDArray[np.float64]


Positions = dict[str, Array]
"""Name -> number at every response position of a split, [position]: those on disk, and `accepted_length`, the expected
number of tokens accepted in a row from there."""
_NAMES = ("acceptance_prob", "acceptance_rate", "entropy", "cross_entropy")


def lower_bounds(entropy: Array, cross_entropy: Array) -> dict[str, Array]:
    """Lower bounds of acceptance_rate: `pinsker`, which may be negative, and `bretagnolle_huber`, in [0, 1]."""
    divergence = np.maximum(cross_entropy - entropy, 0.0)  # tiny negatives come from rounding
    return {"pinsker": 1 - np.sqrt(divergence / 2), "bretagnolle_huber": 1 - np.sqrt(-np.expm1(-divergence))}


def read_positions(paths: list[Path]) -> tuple[Positions, dict[str, int]]:
    """The positions of some shards, and the count of each finish_reason; rows without the columns of both models have
    no positions.

    Raises:
        ValueError: a shard is damaged, or no row has the columns of both models.
    """
    check_sums(paths)
    rows = pd.concat([read_rows(path, [*_NAMES, "finish_reason"]).to_pandas() for path in paths])
    reasons = dict(Counter(map(str, rows.finish_reason)))
    rows = rows.dropna(subset=["acceptance_rate", "entropy"])
    if rows.empty:
        raise ValueError(
            f"{paths[0].parent} has no acceptance_rate or entropy (sequential or imported data), which stats need; "
            "make the data with data.mode: together"
        )
    lengths = np.concatenate([accepted_length(rates) for rates in rows.acceptance_rate])
    positions = {name: np.concatenate(rows[name].to_list()).astype(np.float64) for name in _NAMES}
    return positions | {"accepted_length": lengths}, reasons


def positions_by_set(paths: list[Path]) -> dict[str, dict[str, float | int]]:
    """Rows, tokens and mean acceptance of each set of prompts; empty if there is only one."""
    names = ["set", "acceptance_prob", "acceptance_rate"]
    if "set" not in read_schema(paths[0]).names:
        return {}
    frame = pd.concat([read_rows(path, names).to_pandas() for path in paths])
    return {
        str(name): {
            "rows": len(rows),
            "tokens": int(rows.acceptance_prob.map(len).sum()),
            **{
                column: float(np.concatenate(rows[column].to_list()).mean())
                for column in names[1:]
                if rows[column].notna().all()
            },
        }
        for name, rows in frame.groupby("set")
    }


def accepted_length(acceptance_rate: NDArray[np.floating]) -> Array:
    """L_i = a_i (1 + L_{i+1}): the expected length of the accepted run that starts at each position of one response."""
    lengths = np.zeros(len(acceptance_rate) + 1)
    for index in range(len(acceptance_rate) - 1, -1, -1):
        lengths[index] = acceptance_rate[index] * (1 + lengths[index + 1])
    return lengths[:-1]


def summarise(positions: Positions) -> dict[str, Any]:
    """Means, correlations, rho and c, and the share of positions that violate each bound (0 under temperature 1 without
    truncation).
    """
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
