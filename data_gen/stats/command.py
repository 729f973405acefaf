"""`acceptance-heads stats`: acceptance of a pair, in numbers and in the plots of SVIP's Figures 2-4 (arXiv
2411.18462).
"""

import json
from pathlib import Path
from typing import Any

from configs.schema import Config
from data_gen.store.errors import account
from data_gen.store.manifest import read_manifest
from store.shards import list_shards, write_atomic


def stats(config: Config, *, split: str = "train", plots: bool = True) -> dict[str, Any]:
    """A summary of one split, and SVIP's plots of it.

    Args:
        split: train, dev or test.
        plots: also draw DIR/stats/SPLIT.png.
    """
    # pandas and matplotlib take long to import
    from data_gen.stats.plots import draw
    from data_gen.stats.positions import positions_by_set, read_positions, summarise

    directory = Path(config.data.dir)
    manifest = read_manifest(directory, keys=("sampling",))
    paths = list_shards(directory, split)
    positions, reasons = read_positions(paths)
    summary = summarise(positions) | {
        "rows": sum(reasons.values()),
        "finish_reason": reasons,
        "sampling": manifest["sampling"],
    }
    summary |= {f"prompts_{name}": count for name, count in account(paths).items()}
    summary |= {f"set {name}": facts for name, facts in positions_by_set(paths).items()}
    folder = directory / "stats"
    write_atomic(folder / f"{split}.json", json.dumps(summary, indent=1).encode())
    print(
        "\n".join(
            f"  {name:<28} {value:,.4g}" if isinstance(value, float) else f"  {name:<28} {value}"
            for name, value in summary.items()
        )
    )
    if plots and positions["acceptance_rate"].size:
        draw(positions, summary, folder / f"{split}.png")
        print(f"  {folder / f'{split}.png'}")
    rate = summary["acceptance_rate_mean"]
    print(
        f"The target accepts a drafted token of {split} with probability {rate:.2f} on average (all statistics: "
        f"{folder / f'{split}.json'}); next: acceptance-heads train --config …"
    )
    return summary
