"""Heads for the data of an experiment, in a line of Python: `heads.train_heads`."""

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
    """Train the heads of an experiment, export the best, and return it; resumes, as `acceptance-heads train` does.

    Args:
        config: the experiment, whose data is there (`data_gen.make_data`).
        max_epochs: passes over the data; None: as config.trainer says.
        force: return the best head even if it is worse than the draft's own signals, which need no training.
        settings: of `configs.schema.HeadsConfig`, such as depths=(1, 2), in place of the config's.

    Returns:
        The head of the least calibrated KL on dev, also in config.heads.dir/exported, where `decode.complete` finds it.

    Raises:
        ValueError: a setting that is not there or out of range; no head beats the draft's own signals.
        FileNotFoundError: no data.
    """
    if unknown := sorted(settings.keys() - (HeadsConfig.__dataclass_fields__.keys() - {"dir"})):
        raise ValueError(f"{unknown[0]!r} is no setting of train_heads; HeadsConfig lists them")
    trainer = {"devices": 1, **config.trainer} | ({} if max_epochs is None else {"max_epochs": max_epochs})
    config = replace(config, heads=replace(config.heads, **settings), trainer=trainer)
    check_limits(config)
    train(config)  # says what the heads are worth
    with redirect_stdout(StringIO()):  # export says the same once more
        paths = export(config, head="best", force=force)
    heads = [AcceptanceHead.from_pretrained(path) for path in paths]
    return min(heads, key=lambda head: float(head.provenance.metrics["calibrated_kl"]))
