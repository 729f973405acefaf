"""What a head was trained on, and how it fared: the part of `config.json` that is no architecture.

`accept_weight` and `reject_weight` are the loss weights of law 4.7; they shift what the head says, so calibration needs
them.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Training facts of one head, JSON values only."""

    accept_weight: float = 1.0
    reject_weight: float = 1.0
    calibration_temperature: float = 1.0
    """Fitted on dev; 1 leaves the shift alone to calibrate."""
    mixing_ratio: float | None = None
    """r of the fed-time features (law 4.6); None where nothing is mixed."""
    draft: dict[str, Any] = field(default_factory=dict)
    """path and revision of the model whose hidden states the head reads."""
    target: dict[str, Any] = field(default_factory=dict)
    """path and revision of the model whose verdict it predicts."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """temperature, top_k, top_p of the data; empty: unknown (an imported head)."""
    training: dict[str, Any] = field(default_factory=dict)
    """Data, recipe and steps, for the model card."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Measured on dev; train_… on training responses."""
    recommended: dict[str, Any] = field(default_factory=dict)
    """A threshold and the times it was chosen for; filled by `python -m evaluation tune`."""

    def __post_init__(self) -> None:
        for name in ("accept_weight", "reject_weight", "calibration_temperature"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be a positive number")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Provenance":
        """The fields of this class among `values`; other keys (the architecture's) are left alone."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def as_dict(self) -> dict[str, Any]:
        """All fields, as they stand in config.json."""
        return asdict(self)
