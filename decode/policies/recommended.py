"""The head that decodes if none is named: the fastest tuned one, else the one with the least calibrated KL."""

from collections.abc import Mapping
from math import inf
from os.path import realpath
from pathlib import Path
from typing import Any

from heads.model.files import WEIGHTS, exported_heads, local_directory, rank_of, read_head_config
from store.json_files import read_json

VERDICT = "verdict.json"
"""File in decode.dir with what `evaluate` and `tune` recommend."""
UNTUNED = {"max_rejection_prob": 0.4, "is_calibrated": True}
"""Settings of a head that was never tuned; a calibrated risk does not depend on the weights of its training."""


def read_verdict(directory: Path, heads: Mapping[str, str]) -> dict[str, Any] | None:
    """The verdict in a run's folder; None if there is none, or if it names a head that is newer or not among
    `heads`. Its entry `of` has the models and the sampling that it is about.
    """
    path = directory / VERDICT
    if not path.is_file():
        return None
    keys = ("sentence", "policy", "head", "speed", "of")
    verdict = read_json(path, remedy="delete it, and run `acceptance-heads evaluate` again", keys=keys)
    weights = [file for head in heads.values() if (file := Path(head) / WEIGHTS).is_file()]
    is_newest = all(file.stat().st_mtime <= path.stat().st_mtime for file in weights)
    # the same directory may be spelled in several ways
    has_head = verdict["head"] is None or realpath(str(verdict["head"])) in map(realpath, heads.values())
    return verdict if is_newest and has_head and verdict["policy"] is not None else None


def one_head(path: str | Path) -> str | Path:
    """The path of a head as it is; for a folder of exported heads, that of `best_head`."""
    folder = Path(path)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return path
    directories, _ = exported_heads(folder)
    best = best_head({str(directory): str(directory) for directory in directories})
    return path if best is None else best[0]


def best_head(paths: Mapping[str, str]) -> tuple[str, Mapping[str, object], str] | None:
    """The tuned head with the largest predicted speed-up on dev over the target alone; if none is tuned, the one
    with the least calibrated KL, as a part of that of the draft's own signal at its timing. Returns its path,
    settings of its policy beside those that were tuned, and the reason. Candidate heads, which stop trees, are
    skipped. Only config.json is read.

    Args:
        paths: name of each head -> its directory or hub id.
    """
    configs = {name: read_head_config(Path(local_directory(path)) / "config.json") for name, path in paths.items()}
    chains = {name: config for name, config in configs.items() if config.get("timing") != "candidate"}
    recommended = {name: config.get("recommended", {}) for name, config in chains.items()}
    speed_ups = {
        name: known["tokens_per_s"] * known["t_target_s"]
        for name, known in recommended.items()
        if "tokens_per_s" in known
    }
    if speed_ups:
        name = max(speed_ups, key=speed_ups.__getitem__)
        tuned = recommended[name]
        fixed = tuned.get("fixed_tokens_per_s")
        reason = (
            f"{name} at its tuned threshold {tuned['max_rejection_prob']:.3g}: the first of {len(speed_ups)} tuned "
            f"heads, predicted {speed_ups[name]:.2f} times as fast as the target alone"
        )
        if fixed:
            reason += f", {tuned['tokens_per_s'] / fixed - 1:+.0%} over the best fixed length"
        return paths[name], {}, reason
    if not chains:
        return None
    ranks = {name: rank_of(config.get("metrics", {})) for name, config in chains.items()}
    name = min(ranks, key=ranks.__getitem__)
    is_measured = ranks[name][1] < inf
    why = f"least calibrated KL of {len(ranks)}" if is_measured else "no measured one"
    risk = UNTUNED["max_rejection_prob"]
    reason = f"{name} ({why}), at a calibrated risk of {risk}, since no head is tuned (`acceptance-heads tune`)"
    return paths[name], UNTUNED, reason
