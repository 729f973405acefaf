"""The result of a sweep in one sentence per timing: its best head against the draft's own signals."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from heads.measures.tables import best_heads
from heads.model.head import TIMING_LABELS

_REMEDY = "more data (data.num_train), longer training (trainer.max_epochs) or a higher rate (heads.learning_rate)"


class Rival(NamedTuple):
    """The draft's own signal that heads of a timing must beat."""

    name: str
    title: str


LOG_Q, ENTROPY = Rival("log_token_prob", "log q(y)"), Rival("negative_entropy", "H(q)")


def verdict(result: Result, specs: Sequence[HeadSpec]) -> str:
    """One sentence on the best head of each timing, and a warning for each timing whose heads do not beat its signal.

    Args:
        result: measurements on dev.
        specs: the heads of the sweep.
    """
    lines = [_sentence(result, specs, timing) for timing in _timings(specs)]
    worse = [timing for timing, beats in beats_signal(result, specs).items() if not beats]
    if len(worse) < len(lines):
        lines += [
            f"Warning: no {TIMING_LABELS[timing]} head beats {_rival(timing).title} alone, which needs no training. "
            f"Do not decode with these heads; try {_REMEDY}."
            for timing in worse
        ]
    else:
        lines.append(f"No head beats the draft's own signals, which need no training; try {_REMEDY}.")
    return "\n".join(lines)


def beats_signal(result: Result, specs: Sequence[HeadSpec]) -> dict[str, bool]:
    """Timing -> whether its best head has a lower KL than its signal, both calibrated on dev."""
    return {
        timing: _best(result, specs, timing)[1]["calibrated_kl"]
        < result["signals"][timing][_rival(timing).name]["calibrated_kl"]
        for timing in _timings(specs)
    }


def _sentence(result: Result, specs: Sequence[HeadSpec], timing: str) -> str:
    (name, head), rival = _best(result, specs, timing), _rival(timing)
    alone = result["signals"][timing][rival.name]
    reduction = 1 - head["calibrated_kl"] / alone["calibrated_kl"]
    return (
        f"Best {TIMING_LABELS[timing]} head on dev: {name} with KL {head['calibrated_kl']:.3f} nats per token and "
        f"AUROC {head['auroc']:.3f}, {abs(reduction):.0%} {'less' if reduction > 0 else 'more'} KL than "
        f"{rival.title} alone (KL {alone['calibrated_kl']:.3f}, AUROC {alone['auroc']:.3f}). A constant has KL "
        f"{result['labels'][timing]['constant_kl']:.3f}."
    )


def _timings(specs: Sequence[HeadSpec]) -> list[str]:
    return list(dict.fromkeys(spec.shape.timing for spec in specs))


def _best(result: Result, specs: Sequence[HeadSpec], timing: str) -> tuple[str, Mapping[str, Any]]:
    of_timing = [spec for spec in specs if spec.shape.timing == timing]
    best = min(best_heads(result, of_timing).values(), key=lambda name: result["heads"][name]["calibrated_kl"])
    return best, result["heads"][best]


def _rival(timing: str) -> Rival:
    """H(q) for a prefix head, which does not know the token; else log q(y)."""
    return ENTROPY if timing == "prefix" else LOG_Q
