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
    """The first of the tuned heads (`ranked`); where none is tuned, the one with the least calibrated KL. Candidate
    heads, which stop trees, are passed over. Only config.json is read.

    Args:
        paths: name of each head -> its directory or hub id.
    """
    configs = {name: _config_of(path) for name, path in paths.items()}
    chains = {name: config for name, config in configs.items() if config.get("timing") != "candidate"}
    recommended = {name: config.get("recommended", {}) for name, config in chains.items()}
    if order := ranked(recommended):
        name = order[0]
        tuned = recommended[name]
        reason = (
            f"{name} at its tuned threshold {tuned['max_rejection_prob']:.3g}: the first of {len(order)} tuned "
            f"heads, predicted {_speed_up(tuned):.2f} times as fast as the target alone"
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


def ranked(recommended: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the heads that are tuned, the fastest first: by the speed-up over the target alone that was predicted on
    dev for the threshold at which the head decodes.

    Args:
        recommended: name of each head -> `recommended` of its config.json, as `tune` writes it.
    """
    speed_ups = {name: speed_up for name, tuned in recommended.items() if (speed_up := _speed_up(tuned)) is not None}
    return sorted(speed_ups, key=speed_ups.__getitem__, reverse=True)


def _config_of(path: str) -> dict[str, Any]:
    return read_head_config(Path(local_directory(path)) / "config.json")


def _speed_up(tuned: Mapping[str, Any]) -> float | None:
    """Throughput at the threshold, over that of the target alone; None where nothing was tuned.

    A head that was tuned before `tokens_per_s` was written has the throughput of the rule of law 4.11 instead.
    """
    tokens_per_s = tuned.get("tokens_per_s", tuned.get("throughput"))
    if not {"max_rejection_prob", "t_target_s"} <= tuned.keys() or tokens_per_s is None:
        return None
    return float(tokens_per_s * tuned["t_target_s"])
