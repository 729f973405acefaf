"""Which of several exported heads decodes where none is named: the fastest tuned one, else the one measured best."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from heads.model.files import read_head_config
from heads.model.hub import local_directory

UNTUNED = {"max_rejection_prob": 0.4, "is_calibrated": True}
"""What a head runs at that was never tuned: a calibrated risk means the same whatever the weights of its training."""


class Chosen(NamedTuple):
    """A head, how it stops, and why this one."""

    path: str
    policy: Literal["head", "auto"]
    """head: at a threshold; auto: by the rule of law 4.11, where that was predicted to be faster."""
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
        policy, stops = stop_of(tuned)
        reason = (
            f"{name} {stops}: the first of {len(order)} tuned heads, predicted {_speed_up(tuned):.2f} times as fast as "
            "the target alone"
        )
        return Chosen(paths[name], policy, True, reason)
    losses = {name: config.get("metrics", {}).get("calibrated_kl") for name, config in chains.items()}
    if not losses:
        return None
    name = min(losses, key=lambda name: float("inf") if losses[name] is None else losses[name])
    why = "no measured one" if losses[name] is None else f"least calibrated KL of {len(losses)}"
    untuned = (
        f"at a calibrated risk of {UNTUNED['max_rejection_prob']}, since no head is tuned (`acceptance-heads tune`)"
    )
    return Chosen(paths[name], "head", False, f"{name} ({why}), {untuned}")


def ranked(recommended: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the heads that are tuned, the fastest first: by the speed-up over the target alone that was predicted on
    dev for the faster of threshold and rule.

    Args:
        recommended: name of each head -> `recommended` of its config.json, as `tune` writes it.
    """
    speed_ups = {name: speed_up for name, tuned in recommended.items() if (speed_up := _speed_up(tuned)) is not None}
    return sorted(speed_ups, key=speed_ups.__getitem__, reverse=True)


def stop_of(tuned: Mapping[str, Any]) -> tuple[Literal["head", "auto"], str]:
    """How a tuned head stops, as a policy and in words: by the faster of threshold and rule on dev.

    A head that was tuned before both throughputs were written stops at its threshold.
    """
    if tuned.get("auto_tokens_per_s", 0.0) > tuned.get("tokens_per_s", float("inf")):
        return "auto", "under auto, which needs no threshold"
    return "head", f"at its tuned threshold {tuned['max_rejection_prob']:.3g}"


def _config_of(path: str) -> dict[str, Any]:
    return read_head_config(Path(local_directory(path)) / "config.json")


def _speed_up(tuned: Mapping[str, Any]) -> float | None:
    """Throughput of the faster of threshold and rule, over that of the target alone; None where nothing was tuned."""
    # `throughput`, lambda of the rule, is all that older heads have
    speeds = [tuned[key] for key in ("tokens_per_s", "auto_tokens_per_s") if key in tuned]
    speeds = speeds or [tuned[key] for key in ("throughput",) if tuned.get(key) is not None]
    if not {"max_rejection_prob", "t_target_s"} <= tuned.keys() or not speeds:
        return None
    return float(max(speeds) * tuned["t_target_s"])
