"""What a finished sweep comes to, in a sentence for each timing: its best head against what needs no training."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from heads.measures.tables import best_heads
from heads.model.head import SAID

_REMEDY = "more data (data.num_train), longer training (trainer.max_epochs) or a higher rate (heads.learning_rate)"


class Rival(NamedTuple):
    """The signal of the draft that heads of a timing must beat."""

    name: str
    title: str


LOG_Q, ENTROPY = Rival("log_token_prob", "log q(y)"), Rival("negative_entropy", "H(q)")


def verdict(result: Result, specs: Sequence[HeadSpec]) -> str:
    """Sentences on the best head of each timing, by calibrated KL, with a warning for each timing of which none beats
    its signal.

    Args:
        result: what was measured on dev.
        specs: the heads of the sweep.
    """
    lines = [_sentence(result, specs, timing) for timing in _timings(specs)]
    worse = [timing for timing, beats in beats_signal(result, specs).items() if not beats]
    if len(worse) < len(lines):
        lines += [
            f"Warning: no {SAID[timing]} head beats {_rival(timing).title} alone, which needs no training: decode with "
            f"none of them, or try {_REMEDY}."
            for timing in worse
        ]
    else:
        lines.append(f"No head beats the draft's own signals, which need no training: try {_REMEDY}.")
    return "\n".join(lines)


def beats_signal(result: Result, specs: Sequence[HeadSpec]) -> dict[str, bool]:
    """Timing -> whether its best head has a lower KL than the signal alone, both calibrated on dev."""
    return {
        timing: _best(result, specs, timing)[1]["calibrated_kl"]
        < result["signals"][timing][_rival(timing).name]["calibrated_kl"]
        for timing in _timings(specs)
    }


def _sentence(result: Result, specs: Sequence[HeadSpec], timing: str) -> str:
    (name, head), rival = _best(result, specs, timing), _rival(timing)
    alone = result["signals"][timing][rival.name]
    saved = 1 - head["calibrated_kl"] / alone["calibrated_kl"]
    less = f"{abs(saved):.0%} {'less' if saved > 0 else 'more'} KL than {rival.title}"
    return (
        f"Best {SAID[timing]} head on dev: {name}, KL {head['calibrated_kl']:.3f} nats per token, AUROC "
        f"{head['auroc']:.3f}; {rival.title} alone {alone['calibrated_kl']:.3f}, {alone['auroc']:.3f}; a constant "
        f"{result['labels'][timing]['constant_kl']:.3f}, 0.5: {less}."
    )


def _timings(specs: Sequence[HeadSpec]) -> list[str]:
    return list(dict.fromkeys(spec.shape.timing for spec in specs))


def _best(result: Result, specs: Sequence[HeadSpec], timing: str) -> tuple[str, Mapping[str, Any]]:
    of_timing = [spec for spec in specs if spec.shape.timing == timing]
    best = min(best_heads(result, of_timing).values(), key=lambda name: result["heads"][name]["calibrated_kl"])
    return best, result["heads"][best]


def _rival(timing: str) -> Rival:
    """A prefix head knows the distribution but no token, so neither may its rival."""
    return ENTROPY if timing == "prefix" else LOG_Q
