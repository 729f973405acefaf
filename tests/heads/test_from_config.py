"""`train_heads` from Python: an experiment or a directory with data, Lightning's callbacks, help with every name."""

import json
import pydoc
import shutil
from pathlib import Path

import pytest
import pytorch_lightning as pl

import heads
from heads import AcceptanceHead, train_heads
from tests.toys.made_up import make_config


class CountEpochs(pl.Callback):
    num_epochs = 0

    def on_train_epoch_end(self, *_) -> None:
        self.num_epochs += 1


def test_a_directory_with_data_is_enough_and_callbacks_are_called(data_dir: Path, tmp_path: Path, capsys):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    manifest = json.loads((data / "manifest.json").read_text())
    split = {name: {"prompts": num} for name, num in (("train", 64), ("dev", 24), ("test", 8))}
    extended = manifest | {"split": split, "split_weights": [8, 1, 1], "features": ["fed", "drawn"]}
    (data / "manifest.json").write_text(json.dumps(extended))
    callback = CountEpochs()
    settings = {"depths": (0,), "reject_weights": (1.0,), "specdec": False, "learning_rate": 0.1}
    head = train_heads(data, max_epochs=2, callbacks=[callback], force=True, **settings)
    assert (callback.num_epochs, head.shape_name) == (2, "drawn+s-d0")
    assert AcceptanceHead.from_pretrained(data / "heads" / "exported" / "drawn+s-d0-w1").config == head.config
    assert capsys.readouterr().out.count("Best drawn-time head on dev") == 1
    other = train_heads(make_config(data_dir, tmp_path / "unused"), dir=tmp_path / "run", max_epochs=1, force=True)
    assert other.timing == "fed"
    assert not (tmp_path / "unused").exists()
    assert (tmp_path / "run" / "exported").is_dir()


def test_an_object_where_a_path_is_due_is_refused_in_one_line():
    """By the type check where every call has one."""
    module, checked = AcceptanceHead(4, 0), r"Actual value: AcceptanceHead"
    for call, message in (
        (train_heads, r"^data is AcceptanceHead; give the Config .* or a directory with data$"),
        (AcceptanceHead.from_pretrained, r"^AcceptanceHead is neither a path nor a hub id of a head"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"{message}|{checked}"):
            call(module)


def test_help_shows_every_public_name():
    text = pydoc.render_doc(heads, renderer=pydoc.plaintext)
    for name in (*heads.__all__, "push_to_hub", "head.calibrated("):
        assert name in text
