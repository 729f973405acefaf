"""Training from Python: `heads.train_heads`."""

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

from configs.limits import check_limits
from configs.schema import Config, HeadsConfig
from heads.command import export
from heads.model.head import AcceptanceHead
from heads.training.command import train


def train_heads(
    config: Config, *, max_epochs: int | None = None, force: bool = False, **settings: Any
) -> AcceptanceHead:
    """Train the heads of an experiment, export the best one and return it; resumes, as `acceptance-heads train` does.

    Args:
        config: the experiment; its data must exist (`data_gen.make_data`).
        max_epochs: passes over the data; None: the value of config.trainer.
        force: return the best head even if it is worse than the draft's own signals, which need no training.
        settings: fields of `configs.schema.HeadsConfig` that override the config's, such as depths=(1, 2).

    Returns:
        The head with the lowest calibrated KL on dev, also in config.heads.dir/exported for `decode.complete`.

    Raises:
        ValueError: an unknown setting or one out of range; no head beats the draft's own signals.
        FileNotFoundError: no data.
    """
    if unknown := sorted(settings.keys() - (HeadsConfig.__dataclass_fields__.keys() - {"dir"})):
        raise ValueError(f"train_heads has no setting {unknown[0]!r}; see the fields of HeadsConfig")
    trainer = {"devices": 1, **config.trainer} | ({} if max_epochs is None else {"max_epochs": max_epochs})
    config = replace(config, heads=replace(config.heads, **settings), trainer=trainer)
    check_limits(config)
    train(config)
    with redirect_stdout(StringIO()):  # export repeats the verdict that train has printed
        paths = export(config, head="best", force=force)
    heads = [AcceptanceHead.from_pretrained(path) for path in paths]
    return min(heads, key=lambda head: float(head.provenance.metrics["calibrated_kl"]))
