"""Lightning checkpoints that are whole or not there, wherever the process is killed.

Lightning writes a checkpoint to the folder for temporary files and moves it: between file systems that is a copy, and a kill in the
middle of it destroys the only checkpoint of the run. Here it is written beside its place, fsynced and renamed, as shards are.
"""

import io
import zipfile
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from data_gen.store.shards import write_atomic


class WholeCheckpoints(TorchCheckpointIO):
    """`TorchCheckpointIO` whose local files are written by `write_atomic`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_atomic(Path(path), content.getbuffer())


def check_whole(path: Path) -> None:
    """Raise ValueError if a checkpoint is cut short: its table of contents stands at its end."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} ({path.stat().st_size:,} bytes) is no whole checkpoint; delete it, or pass --resume false, to train anew")
