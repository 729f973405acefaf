"""Speed-ups over the target alone, by column of the papers' tables."""

from collections.abc import Sequence

import numpy as np

from evaluation.gain import Throughput


def speed_ups(
    throughput: Throughput, alone: Throughput, columns: Sequence[str], total: str | None = None
) -> dict[str, float]:
    """Speed-ups on the prompts of each column, columns in alphabetical order, and on all in a column `total`.

    `alone` is the target's throughput on the same prompts; `columns` has the column of each, such as its category.
    """
    labels = np.array(columns)
    parts = {name: labels == name for name in sorted(set(columns))} | ({total: slice(None)} if total else {})
    return {name: float(throughput.at(at).tokens_per_s / alone.at(at).tokens_per_s) for name, at in parts.items()}
