"""Which of several exported heads decodes where none is named: the fastest tuned one, else the one measured best."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from heads.model.files import read_head_config
from heads.model.hub import local_directory

UNTUNED = {"max_rejection_prob": 0.4, "is_calibrated": True}
"""What a head runs at that was never tuned: a calibrated risk means the same whatever the weights of its training."""


class Chosen(NamedTuple):
    """A head, and why this one."""

    path: str
    is_tuned: bool
    reason: str


def best_head(paths: Mapping[str, str]) -> Chosen | None:
    """The head with the largest speed-up over the target alone that `tune` predicts for its rule on dev; where
    none is tuned, the one with the least calibrated KL. Candidate heads, which stop trees, are passed over. Only
    config.json is read.

    Args:
        paths: name of each head -> its directory or hub id.
    """
    configs = {name: _config_of(path) for name, path in paths.items()}
    chains = {name: config for name, config in configs.items() if config.get("timing") != "candidate"}
    speed_ups = {name: speed_up for name, config in chains.items() if (speed_up := _speed_up(config)) is not None}
    if speed_ups:
        name = max(speed_ups, key=speed_ups.__getitem__)
        tuned = chains[name]["recommended"]
        reason = (
            f"{name} at its tuned threshold {tuned['max_rejection_prob']:.3g}: the first of {len(speed_ups)} tuned "
            f"heads, with `auto` predicted {speed_ups[name]:.2f} times as fast as the target alone"
        )
        return Chosen(paths[name], True, reason)
    losses = {name: config.get("metrics", {}).get("calibrated_kl") for name, config in chains.items()}
    if not losses:
        return None
    name = min(losses, key=lambda name: float("inf") if losses[name] is None else losses[name])
    why = "no measured one" if losses[name] is None else f"least calibrated KL of {len(losses)}"
    untuned = (
        f"at a calibrated risk of {UNTUNED['max_rejection_prob']}, since no head is tuned (`acceptance-heads tune`)"
    )
    return Chosen(paths[name], False, f"{name} ({why}), {untuned}")


def _config_of(path: str) -> dict[str, Any]:
    return read_head_config(Path(local_directory(path)) / "config.json")


def _speed_up(config: Mapping[str, Any]) -> float | None:
    """Throughput by the rule of law 4.11, over that of the target alone; None where nothing was tuned."""
    tuned = config.get("recommended", {})
    if not {"max_rejection_prob", "throughput", "t_target_s"} <= tuned.keys() or tuned["throughput"] is None:
        return None
    return float(tuned["throughput"] * tuned["t_target_s"])
