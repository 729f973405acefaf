"""The commands that move heads between formats and places: `export`, `import`, `push`, `inspect`."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from json import dumps as to_json
from pathlib import Path
from typing import Any, Literal

from configs.paths import local_path
from configs.schema import Config, PairConfig
from data_gen.store.identity import describe_model
from heads.measures.evaluation import Result
from heads.measures.tables import best_heads
from heads.measures.verdict import beats_signal, verdict
from heads.model import hub
from heads.model.card import description
from heads.model.confidence import CARD, confidence_head_of, write_confidence_head
from heads.model.fits import check_fits
from heads.model.head import AcceptanceHead
from heads.model.official import read_official_head
from heads.model.provenance import Provenance
from heads.training.checkpoints import check_whole, run_of
from heads.training.directory import RunDirectory
from heads.training.sweep import Sweep
from lm import load_pair
from lm.features.dspark import DSpark
from lm.features.released import released_layout_of
from store.json_files import read_json
from store.shards import atomic_directory

_CARD_METRICS = ("auroc", "calibrated_kl", "calibrated_bce", "calibrated_brier", "calibrated_ece", "raw_kl", "raw_ece")
_LOOKED_FOR = ("timing", "num_layers", "num_parameters", "metrics", "recommended", "sampling")
"""What stands first in the JSON of `inspect`."""
_OTHER_DRAFT = "name the draft that it was trained for as pair.draft"
_KINDS = [AcceptanceHead.__name__]
"""Entry `architectures` of a head's config.json."""


def export(
    config: Config,
    *,
    head: str = "all",
    metric: str = "calibrated_kl",
    out: str | None = None,
    checkpoint: str | None = None,
    force: bool = False,
    format: Literal["head", "dspark"] = "head",
) -> list[Path]:
    """Lightning checkpoint -> safetensors, config.json and model card, one directory per head; or a DSpark draft with
    one head in the place of its confidence head, as engines load it.

    Args:
        config: the experiment; heads.dir holds the checkpoint.
        head: the name of one head, `best` (by the metric on dev, one for each kind of inputs) or `all`.
        metric: the metric of `best`: calibrated_kl, raw_kl, auroc, calibrated_brier, …
        out: the folder of these directories, null: heads.dir/exported; of format dspark the new directory of the
            draft, null: heads.dir/dspark.
        checkpoint: a Lightning checkpoint; null: heads.dir/last.ckpt.
        force: export also where no head beats the draft's own log q(y), which needs no training.
        format: dspark: a copy of pair.draft in which confidence_head.proj alone differs, from a linear prefix head,
            which `head` names if there are several.

    Raises:
        FileNotFoundError: no checkpoint.
        ValueError: one of another run, no such head or metric, heads that are worse than log q(y), or not linear.
    """
    run = RunDirectory(Path(config.heads.dir))
    root = local_path(out, "--out") if out else run.path / ("exported" if format == "head" else "dspark")
    sweep = load_sweep(local_path(checkpoint, "--checkpoint") if checkpoint else run.checkpoint)
    if checkpoint is None and (on_disk := run.read()) and on_disk["run"] != sweep.facts["run"]:
        raise ValueError(
            f"{run.checkpoint} is of an earlier run than {run.path}/run.json, which has no checkpoint yet; let "
            "`acceptance-heads train` go on, or pass --checkpoint to export the earlier run"
        )
    results = _results(run, sweep)
    names = _names(head, sweep, results=results, metric=metric)
    if results and not force:
        _refuse_worse(results["dev"], sweep, names)
    heads = {name: _measured(found, name, results) for name, found in sweep.heads().items() if name in names}
    if format == "dspark":
        return [_written_back(heads, config.pair, root)]
    written = [save_whole(heads[name], root / name) for name in names]
    if results:
        print(verdict(results["dev"], sweep.specs))
    print(f"wrote {len(written)} heads into {root}; next: acceptance-heads evaluate --config …")
    return written


def import_(
    config: Config,
    *,
    source: str,
    out: str,
    reject_weight: float | None = None,
    accept_weight: float = 1.0,
    mixing_ratio: float | None = 0.15,
) -> Path:
    """A released SpecDec++ head, or the confidence head of a DSpark draft -> the same format.

    Args:
        config: the experiment, whose pair says which draft and target the head belongs to, and at which Sampling it is
            to be used.
        source: a directory with config.json and model.safetensors, or a hub id; of a DSpark draft for pair.target, the
            draft.
        out: the directory to which the head is written.
        reject_weight: the reject weight of its training (the official config does not say; its name often does). A
            confidence head has none, and a weight given for it is refused.
        accept_weight: the accept weight of its training.
        mixing_ratio: the mixing ratio of its training data.
    """
    place = local_path(out, "--out")
    pair = replace(config.pair, draft=replace(config.pair.draft, path=source))
    is_dspark = released_layout_of(pair.draft) == "dspark"
    weight = _reject_weight(reject_weight, source, is_dspark=is_dspark)
    if not is_dspark:
        pair = config.pair
    models: dict[str, Any] = {
        name: {"path": model.path, "name": model.path, "revision": model.revision}
        for name, model in (("draft", pair.draft), ("target", pair.target))
    }
    provenance = Provenance(
        accept_weight=accept_weight,
        reject_weight=weight,
        mixing_ratio=None if is_dspark else mixing_ratio,
        sampling=asdict(config.pair.sampling),
        training={"imported_from": source},
        **models,
    )
    head = confidence_head_of(_dspark(pair), provenance) if is_dspark else read_official_head(source, provenance)
    path = save_whole(head, place)
    print(f"wrote the head of {source} into {path}; next: acceptance-heads inspect --path {path}")
    return path


def _reject_weight(given: float | None, source: str, *, is_dspark: bool) -> float:
    """Reject weight of an imported head's training: as given, and 1 of a DSpark draft's, which has none."""
    if is_dspark and given is not None:
        raise ValueError(
            f"--reject_weight is {given}, and the confidence head of {source} was trained without one; leave it out"
        )
    if given is None and not is_dspark:
        raise ValueError(f"{source} does not say its reject weight; give --reject_weight, which its name often says")
    return 1.0 if given is None else given


def _dspark(pair: PairConfig) -> DSpark:
    draft = load_pair(pair).drafting
    assert isinstance(draft, DSpark), "its layout says so"
    return draft


def push(*, path: str, repo: str, private: bool = False) -> str:
    """Put an exported head on the hub, with its model card.

    Args:
        path: the directory of the head.
        repo: owner/name; made if it is not there.
        private: whether a new repository is private.
    """
    directory = local_path(path, "--path")
    if not directory.is_dir():
        raise FileNotFoundError(
            f"no exported head at {path}; `acceptance-heads export` writes one directory per head of a sweep"
        )
    head = AcceptanceHead.from_pretrained(path)
    try:
        commit: Any = head.push_to_hub(repo, private=private, commit_message=f"Upload head {directory.name}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the hub does not take {directory} as {repo!r} ({hub.first_line(error)}); name it owner/name, and `hf "
            "auth login` with a token that may write there"
        ) from error
    print(commit.repo_url)
    return str(commit.repo_url)


def inspect(*, path: str, json: bool = False) -> dict[str, Any]:
    """Print what a head is, what it was trained on, and how it fared.

    Args:
        path: the directory of the head, or its hub id.
        json: print every fact, with hashes and shapes of weights, as one JSON document instead.
    """
    head = AcceptanceHead.from_pretrained(path)
    num_parameters = sum(p.numel() for p in head.parameters())
    facts = head.config | {
        "num_parameters": num_parameters,
        "calibration_shift": head.calibration_shift,
        "tensors": {name: list(t.shape) for name, t in head.state_dict().items()},
    }
    # what somebody looks for first stands first, and the models with their hashes last
    facts = {name: facts.pop(name) for name in _LOOKED_FOR} | facts
    facts |= {name: facts.pop(name) for name in ("draft", "target")}
    print(to_json(facts, indent=1) if json else description(head.config, num_parameters=num_parameters))
    return facts


def load_sweep(checkpoint: Path) -> Sweep:
    """The sweep of a Lightning checkpoint, with the selected weights of each head.

    Raises:
        FileNotFoundError: no checkpoint.
        ValueError: it is broken, or none of a sweep.
    """
    if not checkpoint.is_file():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}; run `acceptance-heads train` with this config first")
    check_whole(checkpoint)
    run_of(checkpoint)
    sweep = Sweep.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    sweep.use_selected()
    return sweep.eval()


def save_whole(head: AcceptanceHead, path: Path) -> Path:
    """Save a head, whole, in place of one that is there.

    Raises:
        ValueError: something else than a head is there, and nothing is touched; or the disk is full.
    """
    with atomic_directory(path) as folder:
        if path.exists() and not _is_head(path):
            raise ValueError(f"{path} is no exported head, and what it holds would be lost; name another directory")
        head.save_pretrained(folder)
    return path


def _is_head(path: Path) -> bool:
    """Whether a directory holds files of a head alone, or nothing."""
    if not path.is_dir() or not {entry.name for entry in path.iterdir()} <= set(hub.FILES):
        return False
    config = path / "config.json"
    kinds = read_json(config, remedy="move it away").get("architectures") if config.is_file() else _KINDS
    return bool(kinds == _KINDS)


def _names(head: str, sweep: Sweep, *, results: dict[str, Any], metric: str) -> list[str]:
    names = [str(spec) for spec in sweep.specs]
    if head == "all":
        return names
    if head == "best":
        if not results:
            raise ValueError(
                "no val_metrics.json of this run beside the checkpoint, so no head is known to be best; let `python "
                "train.py` finish, or name a head"
            )
        return list(best_heads(results["dev"], sweep.specs, metric=metric).values())
    if head not in names:
        raise ValueError(f"no head {head!r} in this sweep; one of {', '.join(names)}, or best, or all")
    return [head]


def _refuse_worse(on_dev: Result, sweep: Sweep, names: Sequence[str]) -> None:
    """Raise ValueError where no head of the sweep beats what needs no training."""
    if not any(beats_signal(on_dev, sweep.specs).values()):
        said = verdict(on_dev, sweep.specs)
        raise ValueError(f"{said} Pass --force (in Python force=True) to export all the same: {', '.join(names)}.")


def _measured(head: AcceptanceHead, name: str, results: dict[str, Any]) -> AcceptanceHead:
    """The head, which knows how it fared where that was measured."""
    if results:
        on_dev, on_train = (results[split]["heads"][name] for split in ("dev", "train"))
        metrics = {key: on_dev[key] for key in _CARD_METRICS if on_dev[key] is not None}
        metrics["train_raw_kl"] = on_train["raw_kl"]
        head.provenance = replace(head.provenance, metrics=metrics)
    return head


def _written_back(heads: dict[str, AcceptanceHead], pair: PairConfig, out: Path) -> Path:
    """The draft's directory with the one of these heads in it that is a linear prefix head."""
    linear = [name for name, head in heads.items() if head.shape_name == "prefix-d0"]
    if len(linear) != 1:
        found = f"{len(linear)} are linear prefix heads ({', '.join(linear)})" if linear else "none is linear"
        raise ValueError(
            f"--format dspark writes one linear prefix head back, and of {', '.join(heads)} {found}; name one with "
            "--head, or train one (heads.timings [prefix], heads.scalars [false], heads.depths [0])"
        )
    [name], source = linear, hub.draft_directory(pair.draft)
    check_fits(heads[name], name, draft={"role": "pair.draft", **describe_model(pair.draft)}, remedy=_OTHER_DRAFT)
    path = write_confidence_head(heads[name], name, source=source, out=out)
    print(f"wrote {source} with the head {name} as its confidence head into {path}; {path / CARD} says what it is for")
    return path


def _results(run: RunDirectory, sweep: Sweep) -> dict[str, Any]:
    """Measurements of these very heads; empty if there are none."""
    if not run.metrics.is_file():
        return {}
    measured = read_json(run.metrics, remedy="train again, or name a head and delete it", keys=("run", "results"))
    return dict(measured["results"]) if measured["run"] == sweep.facts["run"] else {}
