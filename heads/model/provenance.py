"""A head's training data and metrics: the part of `config.json` beside its architecture."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Training facts of one head, JSON values only."""

    accept_weight: float = 1.0
    reject_weight: float = 1.0
    """Loss weights (law 4.7); calibration undoes the shift that they cause."""
    calibration_temperature: float = 1.0
    """Fitted on dev; 1: calibration is the shift alone."""
    mixing_ratio: float | None = None
    """r of the fed-time features (law 4.6); None: no mixing."""
    draft: dict[str, Any] = field(default_factory=dict)
    """path and revision of the model whose hidden states the head reads."""
    target: dict[str, Any] = field(default_factory=dict)
    """path and revision of the model whose acceptance it predicts."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """temperature, top_k, top_p of the data; empty: unknown (an imported head)."""
    training: dict[str, Any] = field(default_factory=dict)
    """Data, recipe and steps, for the model card."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Measured on dev; train_… on training responses."""
    recommended: dict[str, Any] = field(default_factory=dict)
    """A threshold and the times it was chosen for; written by `acceptance-heads tune`."""

    def __post_init__(self) -> None:
        for name in ("accept_weight", "reject_weight", "calibration_temperature"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; use a positive number")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Provenance":
        """From a config.json; keys that are not fields are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
