"""Training from Python: `heads.train_heads`."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path, PurePath
from typing import Any

from pytorch_lightning import Callback, Trainer

from configs.limits import check_limits
from configs.load import load_config
from configs.schema import Config, DataConfig, HeadsConfig, ModelSource, PairConfig, SamplingConfig
from configs.shipped import NAMES
from data_gen.store.manifest import read_manifest
from heads.command import export
from heads.model.files import rank_of
from heads.model.head import AcceptanceHead
from heads.training.command import train
from store.json_files import Json

_OF_DATA = ("split_weights", "mixing_ratio", "draft_length", "draft_every")
"""Settings of the data that training reads, by their names in manifest.json."""


def train_heads(
    data: Config | str | PurePath,
    *,
    dir: str | Path | None = None,
    max_epochs: int | None = None,
    callbacks: Sequence[Callback] = (),
    force: bool = False,
    **settings: Any,
) -> AcceptanceHead:
    """Train heads on existing data, export the best of each kind, and return the best; resumes, as `train` does.

    Args:
        data: the experiment that `data_gen.make_data` returns, the path of a YAML, or a directory with data: data.dir,
            or the `dir` of make_data.
        dir: output directory; None: the experiment's heads.dir, or the folder heads in the directory.
        max_epochs: passes over the data; None: the experiment's value, or one that follows from the amount of data.
        callbacks: callbacks of Lightning, such as EarlyStopping("dev/calibrated_kl"), which is a mean over heads of the
            KL as a part of that of the draft's own signal at each head's timing.
        force: return the best head even if it is worse than the draft's own signal, a logistic of logit q(y).
        settings: fields of `configs.schema.HeadsConfig`, such as depths=(1, 2).

    Returns:
        The head whose calibrated KL on dev is the smallest part of the KL of the draft's own signal at its timing, also
        in DIR/exported for `decode.complete`.

    Raises:
        ValueError: an unknown setting or one out of range; no head beats the draft's own signals.
        FileNotFoundError: no data.
    """
    config = _changed(_experiment(data), dir, max_epochs, callbacks, settings)
    train(config)
    with redirect_stdout(StringIO()):  # export repeats the verdict that train has printed
        paths = export(config, head="best", force=force)
    exported = [AcceptanceHead.from_pretrained(path) for path in paths]
    # labels, and so KLs, differ between timings
    return min(exported, key=lambda head: rank_of(head.provenance.metrics))


def _changed(
    config: Config, dir: str | Path | None, max_epochs: int | None, callbacks: Sequence[Callback], settings: Json
) -> Config:
    """The experiment with the arguments of `train_heads`, on one device by default; ValueError for a wrong one."""
    if unknown := sorted(settings.keys() - (HeadsConfig.__dataclass_fields__.keys() - {"dir"})):
        raise ValueError(f"train_heads has no setting {unknown[0]!r}; see the fields of HeadsConfig")
    trainer: Json = {"devices": 1, **config.trainer}
    if max_epochs is not None:
        trainer["max_epochs"] = max_epochs
    if callbacks:
        trainer["callbacks"] = [*(trainer.get("callbacks") or ()), *callbacks]
    heads = replace(config.heads, **settings, dir=config.heads.dir if dir is None else str(dir))
    changed = replace(config, heads=heads, trainer=trainer)
    check_limits(changed)
    return changed


def _experiment(data: Config | str | PurePath) -> Config:
    """The experiment that `train_heads` gets: itself, in a YAML, or the one whose data is in a directory."""
    if isinstance(data, str | PurePath):
        path = Path(data)
        is_yaml = path.is_file() or path.suffix in (".yaml", ".yml") or str(data) in NAMES
        if path.is_dir() or not is_yaml:
            return _config_of(path)
    return load_config(data, trainer=Trainer)


def _config_of(directory: Path) -> Config:
    """The experiment whose data is in a directory, from its manifest."""
    has_folder = Path(directory, "data", "manifest.json").is_file()  # as `make_data` makes it
    folder = directory / "data" if has_folder else directory
    manifest = read_manifest(folder, keys=("target", "draft", "sampling", "recorded", "split"))
    target, draft = (
        ModelSource(
            path=manifest["recorded"][f"{name}_path"],
            revision=manifest[name].get("revision"),
            dtype=manifest[name].get("dtype", "auto"),
            quantization=manifest[name].get("quantization"),
        )
        for name in ("target", "draft")
    )
    settings: Json = {name: manifest[name] for name in _OF_DATA if manifest.get(name) is not None}
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    settings |= {f"num_{split}": facts["prompts"] for split, facts in manifest["split"].items()}
    return Config(
        pair=PairConfig(target=target, draft=draft, sampling=SamplingConfig(**manifest["sampling"])),
        data=DataConfig(dir=str(folder), **settings),
        heads=HeadsConfig(dir=str(directory / "heads")),
    )
