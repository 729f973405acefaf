"""The results of a sweep as tables (one like Table 3 of SpecDec++, arXiv 2405.19715) and as val_metrics.json."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection

from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from store.shards import write_atomic


def by_kind(specs: Sequence[HeadSpec]) -> dict[str, list[HeadSpec]]:
    """The heads of each kind of inputs."""
    kinds: dict[str, list[HeadSpec]] = {}
    for spec in specs:
        kinds.setdefault(spec.shape.kind, []).append(spec)
    return kinds


def tables(result: Result, specs: Sequence[HeadSpec], *, split: str) -> str:
    """Markdown: KL by depth and reject weight for each kind of inputs (the paper's table), then every head."""
    labels = [
        f"{split}, {timing}-time: {labels['num_tokens']:,.0f} tokens, mean acceptance_prob "
        f"{labels['mean_acceptance_prob']:.3f}; KL of a constant {labels['constant_kl']:.4f}"
        for timing, labels in result["labels"].items()
    ]
    parts = ["\n".join(labels)]
    for kind, of_kind in by_kind(specs).items():
        title = f"### {kind}: binary KL on {split}, nats per token, raw / calibrated"
        parts += [title, _by_depth_and_weight(result, of_kind)]
    parts += [f"### Every head, and each signal alone, on {split}", _every(result, specs)]
    return "\n\n".join(parts) + "\n"


def by_set(results: Mapping[str, Result], specs: Sequence[HeadSpec]) -> str:
    """Markdown: the best head of each kind of inputs on each set of prompts; empty if there is one set."""
    sets = [name for name in results if "/" in name]
    if not sets:
        return ""
    heads = list(best_heads(results["dev"], specs).values())
    rows = []
    for name in sets:
        labels, measured = next(iter(results[name]["labels"].values())), results[name]["heads"]
        cells = [f"{measured[head]['calibrated_kl']:.4f}, {measured[head]['auroc']:.4f}" for head in heads]
        rows.append([name, f"{labels['num_tokens']:,.0f}", f"{labels['mean_acceptance_prob']:.3f}", *cells])
    table = _markdown(["set", "tokens", "mean acceptance prob", *heads], rows)
    return f"### Calibrated KL and AUROC by set of prompts, of the best heads on dev\n\n{table}\n"


def best_heads(result: Result, specs: Sequence[HeadSpec], *, metric: str = "calibrated_kl") -> dict[str, str]:
    """The best head of each kind of inputs by a metric of `result`; ValueError for an unknown metric."""
    known = sorted(name for name, value in result["heads"][str(specs[0])].items() if isinstance(value, float))
    if metric not in known:
        raise ValueError(f"metric {metric!r} is unknown; use one of {', '.join(known)}")
    sign = -1 if metric == "auroc" else 1
    best: dict[str, str] = {}
    for spec in sorted(specs, key=lambda spec: sign * result["heads"][str(spec)][metric]):
        best.setdefault(spec.shape.kind, str(spec))
    return best


def write_metrics(path: Path, results: dict[str, Result], *, run: str | None, history: list[dict[str, Any]]) -> None:
    """Write results and learning curves as JSON; NaN (a draft position that no response reaches) becomes null."""
    measured = {"run": run, "results": results, "history": history}
    finite = apply_to_collection(measured, float, lambda value: None if math.isnan(value) else value)
    text = json.dumps(finite, indent=1)
    write_atomic(path, f"{text}\n".encode())


def _by_depth_and_weight(result: Result, specs: Sequence[HeadSpec]) -> str:
    rows: dict[int, list[str]] = {}
    for spec in specs:
        measured = result["heads"][str(spec)]
        cell = f"{measured['raw_kl']:.4f} / {measured['calibrated_kl']:.4f}"
        rows.setdefault(spec.shape.depth, [str(spec.shape.depth)]).append(cell)
    weights = dict.fromkeys(spec.reject_weight for spec in specs)
    return _markdown(["depth", *(f"w_rej {weight:g}" for weight in weights)], rows.values())


def _every(result: Result, specs: Sequence[HeadSpec]) -> str:
    columns = ("auroc", "calibrated_kl", "calibrated_bce", "calibrated_brier", "calibrated_ece", "raw_kl", "raw_ece")
    measured = {
        f"{name} alone ({timing})": values
        for timing, signals in result["signals"].items()
        for name, values in signals.items()
    }
    measured |= {str(spec): result["heads"][str(spec)] for spec in specs}
    rows = [
        [name, *(f"{values[column]:.4f}" if column in values else "" for column in columns)]
        for name, values in measured.items()
    ]
    return _markdown(["", *(column.replace("_", " ") for column in columns)], rows)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = " | ".join(columns).lstrip()  # a first column without a name is "| |"
    return "\n".join([f"| {header} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows)])
