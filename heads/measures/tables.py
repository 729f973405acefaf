"""The results of a sweep as text: a table like Table 3 of SpecDec++ (arXiv 2405.19715), a longer one, and
val_metrics.json.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from store.shards import write_atomic


def tables(result: Result, specs: Sequence[HeadSpec], *, split: str) -> str:
    """Markdown: for each kind of inputs KL by depth and reject weight (the paper's table), then every head, then the
    signals alone.
    """
    parts = [_labels(result, split)]
    for inputs in dict.fromkeys(spec.shape.kind for spec in specs):
        chosen = [spec for spec in specs if spec.shape.kind == inputs]
        parts += [
            f"### {inputs}: binary KL on {split}, nats per token, raw / calibrated",
            _by_depth_and_weight(result, chosen),
        ]
    parts += [f"### Every head, and each signal alone, on {split}", _every(result, specs)]
    return "\n\n".join(parts) + "\n"


def by_set(results: Mapping[str, Result], specs: Sequence[HeadSpec]) -> str:
    """Markdown: the best head on dev of each kind of inputs, on each set of prompts; nothing where there is one set."""
    sets = [name for name in results if "/" in name]
    if not sets:
        return ""
    heads = list(best_heads(results["dev"], specs).values())
    lines = ["| set | tokens | mean acceptance prob | " + " | ".join(heads) + " |", "|---" * (len(heads) + 3) + "|"]
    for name in sets:
        labels = next(iter(results[name]["labels"].values()))
        cells = [
            f"{of[head]['calibrated_kl']:.4f}, {of[head]['auroc']:.4f}"
            for of in [results[name]["heads"]]
            for head in heads
        ]
        lines.append(
            f"| {name} | {labels['num_tokens']:,.0f} | {labels['mean_acceptance_prob']:.3f} | "
            + " | ".join(cells)
            + " |"
        )
    return (
        "\n\n".join(["### Calibrated KL and AUROC by set of prompts, of the best heads on dev", "\n".join(lines)])
        + "\n"
    )


def best_heads(result: Result, specs: Sequence[HeadSpec], *, metric: str = "calibrated_kl") -> dict[str, str]:
    """The best head of each kind of inputs, by a metric of `result`.

    Raises:
        ValueError: a metric that is not there.
    """
    known = sorted(name for name, value in result["heads"][str(specs[0])].items() if isinstance(value, float))
    if metric not in known:
        raise ValueError(f"metric {metric!r} is unknown; one of {', '.join(known)}")
    sign = -1 if metric == "auroc" else 1
    best: dict[str, str] = {}
    for spec in sorted(specs, key=lambda spec: sign * result["heads"][str(spec)][metric]):
        best.setdefault(spec.shape.kind, str(spec))
    return best


def write_metrics(path: Path, results: dict[str, Result], *, run: str | None, history: list[dict[str, Any]]) -> None:
    """All results and the learning curves of a run, as JSON; NaN (a draft position that no response reaches) becomes
    null.
    """
    text = json.dumps(_finite({"run": run, "results": results, "history": history}), indent=1)
    write_atomic(path, f"{text}\n".encode())


def _labels(result: Result, split: str) -> str:
    lines = [
        f"{split}, {timing}-time: {labels['num_tokens']:,.0f} tokens, mean acceptance_prob "
        f"{labels['mean_acceptance_prob']:.3f}; "
        f"KL of a constant {labels['constant_kl']:.4f}"
        for timing, labels in result["labels"].items()
    ]
    return "\n".join(lines)


def _by_depth_and_weight(result: Result, specs: Sequence[HeadSpec]) -> str:
    weights = list(dict.fromkeys(spec.reject_weight for spec in specs))
    lines = [
        "| depth | " + " | ".join(f"w_rej {weight:g}" for weight in weights) + " |",
        "|---" * (len(weights) + 1) + "|",
    ]
    for depth in dict.fromkeys(spec.shape.depth for spec in specs):
        of_depth = [result["heads"][str(spec)] for spec in specs if spec.shape.depth == depth]
        lines.append(
            f"| {depth} | " + " | ".join(f"{r['raw_kl']:.4f} / {r['calibrated_kl']:.4f}" for r in of_depth) + " |"
        )
    return "\n".join(lines)


def _every(result: Result, specs: Sequence[HeadSpec]) -> str:
    columns = ("auroc", "calibrated_kl", "calibrated_bce", "calibrated_brier", "calibrated_ece", "raw_kl", "raw_ece")
    lines = [
        "| | " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    rows = {
        f"{name} alone ({timing})": values
        for timing, signals in result["signals"].items()
        for name, values in signals.items()
    }
    rows |= {str(spec): result["heads"][str(spec)] for spec in specs}
    for name, values in rows.items():
        cells = [f"{values[column]:.4f}" if column in values else "" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value != value else value
