"""The commands that convert, publish and describe heads: `export`, `import`, `push`, `inspect`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from json import dumps as to_json
from pathlib import Path
from typing import Any, Literal

import torch

from configs.hints import NothingToExportError, first_of, say_next
from configs.load import accepts_yaml
from configs.paths import local_path
from configs.schema import Config, PairConfig
from data_gen.prompts.prompt import say_once
from data_gen.store.manifest import describe_model, read_manifest
from data_gen.store.published import publish
from heads.batches.features import of_timing
from heads.batches.module import FeatureData
from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from heads.measures.report import METRICS, beats_signal, best_heads, signal_kl, verdict
from heads.measures.scores import sequential_temperatures
from heads.model.card import description
from heads.model.confidence import CARD, confidence_head_of, write_confidence_head
from heads.model.files import FILES, downloaded, exported_heads, note_on_earlier, record_export
from heads.model.fits import check_fits
from heads.model.head import AcceptanceHead, Provenance, Timing
from heads.model.official import read_official_head
from heads.model.published import license_of, portable
from heads.training.directory import RunDirectory, run_of
from heads.training.sweep import Sweep
from lm import load_pair
from lm.features.dspark import DSpark
from lm.features.released import released_layout_of
from store.hub import HUB_ERRORS
from store.json_files import Json, read_json
from store.shards import atomic_directory, write_atomic

LINEAR_PREFIX = "prefix-d0"
"""Shape of the heads that become a DSpark draft's confidence head."""


@accepts_yaml
def export(
    config: Config,
    *,
    head: str = "all",
    metric: str = "calibrated_kl",
    out: str | None = None,
    checkpoint: str | None = None,
    force: bool = False,
    format: Literal["head", "dspark", "sts"] = "head",
) -> list[Path]:
    """Run `acceptance-heads export`; `configs.making` documents its flags."""
    run = RunDirectory(Path(config.heads.dir))
    name = {"head": "exported", "dspark": "dspark", "sts": "sts.json"}[format]
    root = local_path(out, "--out") if out else run.path / name
    if format == "sts":
        return [_export_sts(config, root)]
    sweep = _sweep_of(run, checkpoint)
    results = _results_of(sweep, run, checkpoint=checkpoint)
    names = _names(head, sweep.specs, results=results, metric=metric)
    # in `all`, training has just printed the verdict
    lines = [verdict(results["dev"], sweep.specs)] if results and not config.is_step else []
    if results and not force:
        names, refusal = _passing(names, sweep, results=results["dev"], folder=root if format == "head" else None)
        lines += refusal
    trained = sweep.heads()
    heads = {name: trained[name] for name in names}
    for name, of_name in heads.items():
        _complete_provenance(name, of_name, results, stopped_in=sweep.stopped_in)
    if format == "dspark":
        return [_export_dspark(heads, config.pair, root)]
    written = [save_whole(of_name, root / name) for name, of_name in heads.items()]
    record_export(root, heads, run=sweep.facts["run"])
    _, others = exported_heads(root)
    if others:
        say_once(note_on_earlier(others, root))
    print("\n".join([*lines, f"wrote {len(written)} heads to {root}"]))
    say_next(config, "evaluate")
    return written


def _results_of(sweep: Sweep, run: RunDirectory, *, checkpoint: str | None) -> dict[str, Result]:
    """The results of a checkpoint's weights; empty, with a warning, for weights that were not measured."""
    is_newest = checkpoint is None or Path(checkpoint).resolve() == run.checkpoint.resolve()
    is_measured = is_newest or sweep.stopped_in is None
    if is_measured and (results := run.results(sweep.facts["run"])):
        return results
    about = f"these heads were not measured ({run.metrics} has no metrics of them)."
    if sweep.stopped_in is not None:
        about = (
            f"these heads are unfinished and were not measured: their training stopped in {sweep.stopped_in}. "
            "Run `acceptance-heads train` with this config to finish it."
        )
    print(f"warning: {about}", file=sys.stderr)
    return {}


def _complete_provenance(
    name: str, head: AcceptanceHead, results: Mapping[str, Result], *, stopped_in: str | None
) -> None:
    """Set the metrics of a head, or where its training stopped before it was measured."""
    if results:
        metrics = _on_split(name, head.timing, results["dev"])
        if "test" in results:
            metrics["test"] = _on_split(name, head.timing, results["test"])
        metrics["train_raw_kl"] = results["train"]["heads"][name]["raw_kl"]
        head.provenance = replace(head.provenance, metrics=metrics)
    elif stopped_in is not None:
        training = head.provenance.training | {"stopped_in": stopped_in}
        head.provenance = replace(head.provenance, training=training)


def _passing(
    names: Sequence[str], sweep: Sweep, *, results: Result, folder: Path | None
) -> tuple[list[str], list[str]]:
    """The heads that each beat the signal of their own timing, and lines on the others; NothingToExportError if none
    does. `folder`: of exported heads; None for a DSpark draft.
    """
    specs = sweep.specs
    beats = beats_signal(results, specs)
    if folder is None:  # a draft takes one head, so that no other decides
        linear = [str(spec) for spec in specs if str(spec.shape) == LINEAR_PREFIX and str(spec) in names]
        names = linear or names
    passing = [name for name in names if beats[name]]
    refused = [name for name in names if not beats[name]]
    remedy = "Pass --force (force=True in Python) to export anyway"
    if not passing:
        if folder is not None and folder.is_dir():  # heads of earlier runs must not compete
            record_export(folder, [], run=sweep.facts["run"])
        raise NothingToExportError(f"{verdict(results, specs)} {remedy}: {first_of(names)}.")
    lines = [
        f"{len(refused)} of {len(names)} heads do not beat the draft's own signal at their timing and are not "
        f"exported: {first_of(refused)}. {remedy}."
    ]
    return passing, lines if refused else []


def _on_split(name: str, timing: Timing, result: Result) -> dict[str, object]:
    """Metrics of a head, its signal and a constant on one split; those without a value are left out."""
    head = result["heads"][name]
    labels = result["labels"][timing]
    metrics = {key: head.get(key) for key in (*METRICS, "kl_interval", "lead", "lead_interval")}
    metrics |= {key: labels.get(key) for key in ("num_responses", "num_tokens", "constant_kl")}
    metrics["signal_kl"] = signal_kl(result, timing)
    return {key: value for key, value in metrics.items() if value not in (None, [None, None])}


def _sweep_of(run: RunDirectory, checkpoint: str | None) -> Sweep:
    sweep = load_sweep(local_path(checkpoint, "--checkpoint") if checkpoint else run.checkpoint)
    if checkpoint is None and (on_disk := run.read()) and on_disk["run"] != sweep.facts["run"]:
        raise ValueError(
            f"{run.checkpoint} belongs to an earlier run, and the run in {run.path}/run.json has no checkpoint "
            f"yet; continue `acceptance-heads train`, or pass --checkpoint {run.checkpoint} to export the "
            "earlier run"
        )
    if sweep.config.layer is not None:
        raise ValueError(
            f"heads.layer is {sweep.config.layer}, so these heads only compare layers (tables.md): decoding "
            "reads the draft's last hidden state; train with heads.layer null to export"
        )
    return sweep


@accepts_yaml
def import_(
    config: Config,
    *,
    source: str,
    out: str,
    reject_weight: float | None = None,
    mixing_ratio: float | None = 0.15,
) -> Path:
    """Run `acceptance-heads import`; `configs.making` documents its flags."""
    out_path = local_path(out, "--out")
    pair = config.pair
    of_source = replace(pair, draft=replace(pair.draft, path=source))
    is_dspark = released_layout_of(of_source.draft) == "dspark"
    if is_dspark and reject_weight is not None:
        raise ValueError(
            f"--reject_weight is {reject_weight}, but {source} has a confidence head that was trained without "
            "one; remove it"
        )
    if reject_weight is None and not is_dspark:
        raise ValueError(
            f"{source} does not record its reject weight; pass --reject_weight (the head's name often contains it)"
        )
    draft = of_source.draft if is_dspark else pair.draft
    facts = [{"path": model.path, "name": model.path, "revision": model.revision} for model in (draft, pair.target)]
    provenance = Provenance(
        reject_weight=1.0 if reject_weight is None else reject_weight,
        mixing_ratio=None if is_dspark else mixing_ratio,
        draft=facts[0],
        target=facts[1],
        sampling=asdict(pair.sampling),
        training={"imported_from": source},
    )
    if is_dspark:
        head = confidence_head_of(load_pair(of_source).drafting, provenance)  # type: ignore[arg-type]
    else:
        head = read_official_head(source, provenance)
    path = save_whole(head, out_path)
    print(f"wrote the head of {source} to {path}; next: acceptance-heads inspect --path {path}")
    return path


def push(*, path: str, repo: str, private: bool = False, license: str | None = None) -> str:
    """Run `acceptance-heads push`; `configs.making` documents its flags."""
    directory = local_path(path, "--path")
    if (directory / "manifest.json").is_file():
        manifest = portable(read_manifest(directory, keys=("target", "draft", "sampling")))
        target = {"path": manifest.get("recorded", {}).get("target_path"), **manifest["target"]}
        stated = license or license_of(target, may_download=True)
        address = publish(directory, repo, manifest=manifest, license=stated, private=private)
        print(address)
        return address
    head = AcceptanceHead.from_pretrained(directory)
    stated = license or head.provenance.license or license_of(head.provenance.draft, may_download=True)
    head.provenance = replace(head.provenance, license=stated)
    try:
        commit: Any = head.push_to_hub(repo, private=private, commit_message=f"Upload head {directory.name}")
    except HUB_ERRORS as error:
        cause = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{path} was not uploaded to {repo} ({type(error).__name__}: {cause}); check the repository's name, "
            "the network and HF_ENDPOINT, and log in with `hf auth login` (a token that may write)"
        ) from error
    print(commit.repo_url)
    return str(commit.repo_url)


def inspect(*, path: str, json: bool = False) -> Json:
    """Run `acceptance-heads inspect`; `configs.making` documents its flags."""
    head = AcceptanceHead.from_pretrained(path)
    facts = head.config | {"num_parameters": head.num_parameters, "calibration_shift": head.calibration_shift}
    facts["tensors"] = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    print(to_json(facts, indent=1) if json else description(head.config, num_parameters=head.num_parameters))
    return facts


def load_sweep(checkpoint: Path) -> Sweep:
    """The sweep of a checkpoint of `acceptance-heads train`, with the selected weights; ValueError for another file."""
    if not checkpoint.is_file():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}; run `acceptance-heads train` with this config first")
    run_of(checkpoint)
    sweep = Sweep.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    sweep.use_selected()
    return sweep.eval()


def save_whole(head: AcceptanceHead, path: Path) -> Path:
    """Save a head atomically, also over another head; ValueError if something else is there, or the disk is full."""
    with atomic_directory(path) as folder:
        config = path / "config.json"
        is_head = path.is_dir() and {entry.name for entry in path.iterdir()} <= {*FILES}
        if is_head and config.is_file():
            is_head = read_json(config, remedy="move it away").get("architectures") == [AcceptanceHead.__name__]
        if path.exists() and not is_head:
            raise ValueError(f"{path} exists and is not an exported head, so it is kept; name another directory")
        head.save_pretrained(folder)
    return path


def _names(head: str, specs: Sequence[HeadSpec], *, results: Mapping[str, Result], metric: str) -> list[str]:
    names = [str(spec) for spec in specs]
    if head == "all":
        return names
    if head == "best" and results:
        return list(best_heads(results["dev"], specs, metric=metric).values())
    if head == "best":
        raise ValueError(
            "--head best needs val_metrics.json, which this run has not written yet; let `acceptance-heads "
            "train` finish, or name a head"
        )
    if head not in names:
        raise ValueError(f"this sweep has no head {head!r}; pass --head best, all, or one of {', '.join(names)}")
    return [head]


def _export_dspark(heads: dict[str, AcceptanceHead], pair: PairConfig, out: Path) -> Path:
    """A copy of the draft's directory with the only linear prefix head among `heads` as its confidence head."""
    linear = [name for name, head in heads.items() if head.shape_name == LINEAR_PREFIX]
    if len(linear) != 1:
        count = f"{len(linear)} are linear prefix heads ({', '.join(linear)})" if linear else "none is linear"
        raise ValueError(
            f"--format dspark needs exactly one linear prefix head; of {', '.join(heads)} {count}. Name one with "
            "--head, or train one (heads.timings [prefix], heads.scalars [false], heads.depths [0])"
        )
    name = linear[0]
    head = heads[name]
    source = Path(pair.draft.path)
    if not source.is_dir():
        source = downloaded(pair.draft.path, kind="draft", revision=pair.draft.revision)
    remedy = "set pair.draft to the draft that the head was trained for"
    check_fits(head.provenance, name, draft={"role": "pair.draft", **describe_model(pair.draft)}, remedy=remedy)
    path = write_confidence_head(head, name, source=source, out=out)
    print(f"wrote {path}: a copy of {source} with the head {name} as its confidence head; {path / CARD} describes it")
    return path


def confidence_data(config: Config) -> tuple[FeatureData, DSpark]:
    """An experiment's data, as prefix heads read it, and its draft; ValueError if that has no confidence head."""
    path = config.pair.draft.path
    sets = config.heads
    if released_layout_of(config.pair.draft) != "dspark":
        raise ValueError(f"pair.draft is {path}, which is not a DSpark draft; set it to one with a confidence head")
    sets = replace(sets, timings=("prefix",), scalars=(True,), embeddings=(False,), specdec=False, states="cached")
    data = FeatureData(config.data, sets, pair=config.pair)
    data.setup()
    draft = load_pair(config.pair).drafting
    assert isinstance(draft, DSpark), "its layout is DSpark's"
    if draft.confidence_head is None:
        raise ValueError(f"pair.draft is {path}, which has no confidence head; set it to a DSpark draft with one")
    return data, draft


@torch.inference_mode()
def _export_sts(config: Config, path: Path) -> Path:
    """The temperatures of the draft's confidences, fitted to whole blocks of the dev split."""
    data, draft = confidence_data(config)
    blocks = []
    for batch in data.loader("dev"):
        features = of_timing(batch, "prefix")
        logits = draft.confidence(features.hidden.float().to(draft.device, draft.dtype)).cpu()
        prob = batch["drawn"].acceptance_prob.float()
        lengths = features.row_lengths.tolist()
        rows = zip(logits.split(lengths), prob.split(lengths), strict=True)
        blocks += [torch.stack(row) for row in rows if len(row[0]) == draft.block_size]
    if not blocks:
        raise ValueError(
            f"no draft of the dev split in {config.data.dir} has all {draft.block_size} tokens of a block; set "
            "data.draft_length to the block, raise data.num_dev, and make the data again"
        )
    logits, probs = torch.stack(blocks).double().unbind(1)
    facts = {"dataset": f"{portable(config.data.dir)}, dev", "num_samples": len(blocks)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, to_json(sequential_temperatures(logits, probs.cumprod(1)) | facts, indent=1).encode())
    print(f"wrote {path}; next: sglang --speculative-dspark-confidence-sts-path {path}")
    return path
