"""What the run asks of Lightning's private side is what Lightning does: these tests fail where a later version answers
otherwise.
"""

import re
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from heads.training import trainer as lightning_private
from heads.training.command import train
from heads.training.trainer import is_validation_due, is_within_step
from tests.toys.made_up import ROOT, make_config


class Witness(pl.Callback):
    """After each batch: what is said of it, how many steps have been taken, and whether a validation follows."""

    def __init__(self) -> None:
        self.said: list[tuple[bool, bool]] = []
        self.steps: list[int] = []
        self.validated_after: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.said.append((is_within_step(trainer), is_validation_due(trainer)))
        self.steps.append(trainer.global_step)

    def on_validation_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.validated_after.append(len(self.steps))


def test_steps_and_validations_come_when_lightning_says_so(data_dir: Path, tmp_path: Path):
    """8 batches an epoch, three to a step, the last step of an epoch of two; a validation after every fourth batch."""
    witness = Witness()
    trainer = {"callbacks": [witness], "accumulate_grad_batches": 3, "val_check_interval": 4}
    train(make_config(data_dir, tmp_path, depths=(0,), trainer=trainer))
    assert witness.steps == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6]
    before = [0, *witness.steps[:-1]]
    assert [within for within, _ in witness.said] == [
        now == then for now, then in zip(witness.steps, before, strict=True)
    ]
    assert witness.validated_after == [4, 8, 12, 16]
    assert [number for number, (_, due) in enumerate(witness.said, start=1) if due] == witness.validated_after


def test_before_a_run_no_validation_is_due():
    assert not is_validation_due(pl.Trainer(accelerator="cpu", logger=False))


def test_one_file_alone_names_what_is_private_of_lightning():
    """Attributes of the trainer, its loops and connectors that begin with `_`."""
    private = re.compile(
        r"\._trainer\b|(trainer|loop|connector)\._(?!_)|\b_should_\w+|_data_fetcher|"
        r"import _\w+.*lightning|lightning.* import _"
    )
    naming = [path.name for path in (ROOT / "heads").rglob("*.py") if private.search(path.read_text())]
    naming += [path.name for path in [ROOT / "train.py"] if private.search(path.read_text())]
    assert naming == [Path(lightning_private.__file__).name]
