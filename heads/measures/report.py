"""The results of a sweep: a sentence per timing, Markdown tables (one like Table 3 of SpecDec++, arXiv 2405.19715), and
val_metrics.json.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightning_utilities.core.apply_func import apply_to_collection

from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from heads.model.files import LEAST_KL
from heads.model.head import TIMING_LABELS, Timing
from heads.model.inputs import SIGNALS
from lm.signals import SCALARS
from store.shards import write_atomic

_REMEDY = "more data (data.num_train), longer training (trainer.max_epochs) or a higher rate (heads.learning_rate)"
METRICS = ("auroc", "calibrated_kl", "calibrated_bce", "calibrated_brier", "calibrated_ece", "raw_kl", "raw_ece")
"""Metrics of the table of every head, and of a model card."""


def by_kind(specs: Sequence[HeadSpec]) -> dict[str, list[HeadSpec]]:
    """The heads of each kind of inputs."""
    kinds = dict.fromkeys(spec.shape.kind for spec in specs)
    return {kind: [spec for spec in specs if spec.shape.kind == kind] for kind in kinds}


def best_heads(result: Result, specs: Sequence[HeadSpec], *, metric: str = "calibrated_kl") -> dict[str, str]:
    """The best head of each kind of inputs by a metric of `result`; ValueError for an unknown metric."""
    known = sorted(name for name, value in result["heads"][str(specs[0])].items() if isinstance(value, float))
    if metric not in known:
        raise ValueError(f"metric {metric!r} is unknown; use one of {', '.join(known)}")
    sign = -1 if metric in ("auroc", "lead") else 1
    return {
        kind: min(map(str, of_kind), key=lambda name: sign * result["heads"][name][metric])
        for kind, of_kind in by_kind(specs).items()
    }


def verdict(result: Result, specs: Sequence[HeadSpec]) -> str:
    """One sentence on the best head of each timing on dev; a warning for each whose heads do not beat its signal."""
    beats = beats_signal(result, specs)
    lines: list[str] = []
    worse: list[str] = []
    for timing in dict.fromkeys(spec.shape.timing for spec in specs):
        if _is_constant(result, timing):
            mean = result["labels"][timing]["mean_acceptance_prob"]
            lines.append(
                f"There is nothing to predict for {TIMING_LABELS[timing]} heads on dev: the acceptance "
                f"probability is {mean:.3f} at every token (a constant has KL 0), so a fixed draft length "
                "serves as well as any head."
            )
            continue
        names = [str(spec) for spec in specs if spec.shape.timing == timing]
        name = min(names, key=lambda name: result["heads"][name]["calibrated_kl"])
        head = result["heads"][name]
        alone = result["signals"][timing][SIGNALS[timing]]
        title = SCALARS[SIGNALS[timing]].symbol
        reduction = 1 - head["calibrated_kl"] / max(alone["calibrated_kl"], LEAST_KL)
        lines.append(
            f"Best {TIMING_LABELS[timing]} head on dev: {name} with KL {head['calibrated_kl']:.3f} nats per "
            f"token and AUROC {head['auroc']:.3f}, {abs(reduction):.0%} {'less' if reduction > 0 else 'more'} "
            f"KL than {title} alone (KL {alone['calibrated_kl']:.3f}, AUROC {alone['auroc']:.3f}). A constant "
            f"has KL {result['labels'][timing]['constant_kl']:.3f}."
        )
        if not beats[name]:
            warning = f"Warning: no {TIMING_LABELS[timing]} head beats {title} alone, which takes two numbers."
            worse.append(f"{warning} Do not decode with these heads; try {_REMEDY}.")
    if len(worse) == len(lines):
        worse = [f"No head beats the draft's own signals, which take two numbers; try {_REMEDY}."]
    return "\n".join([*lines, *worse])


def signal_kl(result: Result, timing: Timing) -> float:
    """KL of the draft's own signal at a timing, with the two numbers that were fitted to training responses."""
    return float(result["signals"][timing][SIGNALS[timing]]["calibrated_kl"])


def beats_signal(result: Result, specs: Sequence[HeadSpec]) -> dict[str, bool]:
    """Name of each head -> whether it has a lower calibrated KL than the draft's own signal at its timing; False where
    the acceptance probability is constant, since KLs of 0 differ only by rounding.
    """
    beats: dict[str, bool] = {}
    for spec in specs:
        kl = result["heads"][str(spec)]["calibrated_kl"]
        timing = spec.shape.timing
        beats[str(spec)] = not _is_constant(result, timing) and kl < signal_kl(result, timing)
    return beats


def _is_constant(result: Result, timing: Timing) -> bool:
    """Whether all tokens have one acceptance probability, such as 1 if the draft equals the target."""
    return bool(result["labels"][timing]["constant_kl"] < LEAST_KL)


def tables(result: Result, specs: Sequence[HeadSpec], *, split: str) -> str:
    """Markdown: KL by depth and reject weight for each kind of inputs (the paper's table), then every head."""
    labels = [
        f"{split}, {timing}-time: {labels['num_tokens']:,.0f} tokens, mean acceptance_prob "
        f"{labels['mean_acceptance_prob']:.3f}; KL of a constant {labels['constant_kl']:.4f}"
        for timing, labels in result["labels"].items()
    ]
    parts = ["\n".join(labels)]
    for kind, of_kind in by_kind(specs).items():
        rows: dict[int, dict[str, str]] = {}
        for spec in of_kind:
            measured = result["heads"][str(spec)]
            cell = f"{measured['raw_kl']:.4f} / {measured['calibrated_kl']:.4f}"
            rows.setdefault(spec.shape.depth, {})[_recipe(spec)] = cell
        columns = list(dict.fromkeys(map(_recipe, of_kind)))
        cells = [[str(depth), *(row.get(column, "") for column in columns)] for depth, row in rows.items()]
        title = f"### {kind}: binary KL on {split}, nats per token, raw / calibrated"
        parts += [title, _markdown(["depth", *columns], cells)]
    alone = [
        (f"{name} alone ({timing})", of) for timing, each in result["signals"].items() for name, of in each.items()
    ]
    measured = [*alone, *((str(spec), result["heads"][str(spec)]) for spec in specs)]
    every = [[name, *(_cell(of.get(metric, math.nan)) for metric in METRICS)] for name, of in measured]
    titles = ["", *(metric.replace("_", " ") for metric in METRICS)]
    parts += [f"### Every head, and each signal alone, on {split}", _markdown(titles, every)]
    return "\n\n".join(parts) + "\n"


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def _recipe(spec: HeadSpec) -> str:
    weight = f"w_rej {spec.reject_weight:g}"
    return f"{weight}, dropout {spec.dropout:g}" if spec.dropout else weight


def by_set(results: Mapping[str, Result], specs: Sequence[HeadSpec]) -> str:
    """Markdown: the best head of each kind of inputs on each set of prompts; empty if there is one set."""
    sets = [name for name in results if "/" in name]
    if not sets:
        return ""
    heads = list(best_heads(results["dev"], specs).values())
    rows = []
    for name in sets:
        labels = next(iter(results[name]["labels"].values()))
        measured = results[name]["heads"]
        cells = [f"{_cell(measured[head]['calibrated_kl'])}, {_cell(measured[head]['auroc'])}" for head in heads]
        rows.append([name, f"{labels['num_tokens']:,.0f}", f"{labels['mean_acceptance_prob']:.3f}", *cells])
    table = _markdown(["set", "tokens", "mean acceptance prob", *heads], rows)
    return f"### Calibrated KL and AUROC by set of prompts, of the best heads on dev\n\n{table}\n"


def write_metrics(path: Path, results: dict[str, Result], *, run: str | None, history: list[Result]) -> None:
    """Write results and learning curves as JSON; NaN (a draft position that no response reaches) becomes null."""
    measured = {"run": run, "results": results, "history": history}
    finite = apply_to_collection(measured, float, lambda value: None if math.isnan(value) else value)
    write_atomic(path, f"{json.dumps(finite, indent=1)}\n".encode())


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = " | ".join(columns).lstrip()  # a first column without a name is "| |"
    rule = "".join("|---" for _ in columns)
    return "\n".join([f"| {header} |", f"{rule}|", *(f"| {' | '.join(row)} |" for row in rows)])
