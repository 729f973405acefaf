"""manifest.json: what the files of a directory were made from, so that a run with other settings cannot add shards.

`settle` and `read_manifest` serve every directory of shards, also those of traces. Everything that determines
the rows is compared: a file of responses up to its earlier size, and prompts shard by shard
(`data_gen.pipeline.stages`). The entry `recorded` is not compared: git commit, machine, thread count, engine,
and the paths of local models, whose weights are compared instead. Batch and chunk sizes, which affect only
rounding, are in each shard's sidecar. Equal manifests and sizes give equal bytes on equal hardware with the same
thread count; otherwise rows have the same distribution. The stage `respond` in half precision is an exception,
because its batches have requests of several shards (docs/large-models.md).

A model is identified without loading it: a hub model by its commit, a local one by hashes of its files.

    weights        sha256 over all weights files (and the model's own code, if any)
    config         sha256 over config.json and generation_config.json, without the version that wrote them
"""

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError

from configs.schema import DataConfig, ModelSource, PairConfig
from lm.draws import GENERATOR
from lm.features.released import MTP, commit_of, released_layout_of, width_of, without_mtp
from lm.folders import refuse_no_model
from store.facts import FileFacts
from store.json_files import read_json
from store.shards import sha256_of, write_atomic

if TYPE_CHECKING:  # transformers takes long to import
    from transformers import PreTrainedTokenizerBase

Manifest = Mapping[str, Any]
"""What manifest.json holds, or part of it."""
_SLOW_BYTES = 2**32
"""Minimum size of files whose hashing is announced."""
IGNORED_KEYS = ("transformers_version", "_name_or_path")
"""Entries of config.json that say where it was written, not what the model is."""


def describe_model(source: ModelSource, *, known: Manifest | None = None) -> dict[str, Any]:
    """Name, revision, commit and hashes of a model; FileNotFoundError if it is not there, ValueError if invalid.
    `known`: an earlier description, perhaps of the same files, whose config.json is then not parsed again.
    """
    if (target := without_mtp(source)) != source:  # the target's files hold its MTP layer
        described = describe_model(target)
        return described | {key: f"{described[key]}{MTP}" for key in ("name", "commit", "weights") if described[key]}
    refuse_no_model(source.path)
    folder = Path(source.path)
    is_local = folder.is_dir()
    configs = _configs(folder) if is_local else None
    try:
        width = width_of(source)
        if width is None and known and configs and configs == known.get("config"):
            width = known["hidden_size"]
        elif width is None:  # no feature draft, of which transformers does not know every layout
            width = _width_in_transformers(source)
        commit = commit_of(source)
    except OSError as error:
        raise FileNotFoundError(
            f"no model at {source.path!r} (revision {source.revision or 'main'}): {str(error).splitlines()[0]}"
        ) from error
    except StrictDataclassError as error:
        raise ValueError(
            f"transformers cannot read config.json of {source.path!r}: {' '.join(str(error).split())}"
        ) from error
    return {
        "name": folder.name if is_local else source.path,
        "revision": source.revision,
        "commit": commit,
        "weights": _weights(folder) if is_local else None,
        "config": configs,
        "dtype": source.dtype,
        "hidden_size": width,
        # omitted if null, as in manifests written before the setting existed
        **({} if source.quantization is None else {"quantization": source.quantization}),
    }


def _width_in_transformers(source: ModelSource) -> int:
    from transformers import AutoConfig

    from lm.pair import repository_of

    config = AutoConfig.from_pretrained(source.path, **repository_of(source))
    return int(config.get_text_config().hidden_size)


def same_model(first: Mapping[str, object], second: Mapping[str, object]) -> bool | None:
    """Whether two descriptions are of the same weights; None if they cannot be compared."""
    for key in ("weights", "commit"):
        if first.get(key) and second.get(key):
            return bool(first[key] == second[key])
    return None


def _weights(folder: Path) -> str | None:
    """The hash of all weights, None if there are none; those of large files are remembered (`store.facts`)."""
    tensors = list(folder.glob("*.safetensors"))
    if not tensors:
        return None
    paths = sorted([*tensors, *folder.glob("*.py")])
    known = FileFacts()
    num_bytes = sum(path.stat().st_size for path in paths if not known.has(path, "sha256"))
    if num_bytes >= _SLOW_BYTES:
        print(f"{folder}: hashing {num_bytes / 1e9:,.0f} GB of weights (only once)", file=sys.stderr, flush=True)
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(partial(known.fact, name="sha256", read=sha256_of), paths))
    known.save()
    lines = [f"{path.name} {sha256}" for path, sha256 in zip(paths, sums, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _configs(folder: Path) -> str:
    configs = []
    for path in (folder / "config.json", folder / "generation_config.json"):
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        configs.append({key: value for key, value in values.items() if key not in IGNORED_KEYS})
    return hashlib.sha256(json.dumps(configs, sort_keys=True).encode()).hexdigest()


FORMAT = 3
"""Data format: 3 stores each number once (labels/), 2 stored it beside the hidden states of each timing."""
_PACKAGES = ("torch", "transformers", "tokenizers")
"""Packages that affect the rows; compared up to their minor version."""
_WRITERS = ("safetensors", "pyarrow")
_UNCOMPARED = {
    *("dir", "engine", "ray", "server", "responses", "split_ids", "batch_size", "chunk_mb", "max_error_share"),
    *("num_train", "num_dev", "num_test", "labels"),
}
_OF_STATES = ("features", "feature_dtype")
"""Entries of earlier versions, whose data had hidden states."""
_OF_SERVER = ("model", "kind", "prompt_as", "extra")
"""Settings that the responses of a server depend on."""
_COMMITS = ("target.commit", "draft.commit")
"""Null in data of hub models that was made with transformers 5.23 and version 0.2.0."""
_OBJECTS = ("target", "draft", "sampling", "split", "versions", "recorded")
_GROWING = ("split", "split_by", "responses")
"""Entries that a later run may enlarge."""
_REUSE = " (`acceptance-heads responses` exports the existing responses for reuse)"


def make_manifest(
    pair: PairConfig, data: DataConfig, *, tokenizer: "PreTrainedTokenizerBase", split: Mapping[str, object]
) -> dict[str, Any]:
    """The manifest of a run, before any model is loaded; `split`: the number of prompts of each split."""
    has_feature_draft = bool(released_layout_of(pair.draft))
    server = {name: getattr(data.server, name) for name in _OF_SERVER}
    return {
        "format": FORMAT,
        "target": describe_model(pair.target),
        "draft": describe_model(pair.draft),
        "tokenizer": digest(tokenizer_text(tokenizer)),
        "chat_template": digest(str(tokenizer.chat_template)) if data.template == "chat" else None,
        "sampling": asdict(pair.sampling),
        **{name: value for name, value in asdict(data).items() if name not in _UNCOMPARED},
        "draft_length": data.draft_length if has_feature_draft else None,
        # null, as in directories made before the setting existed
        "draft_every": data.draft_every if data.draft_every > 1 and has_feature_draft else None,
        "labels": data.labels if data.labels == "server" else None,
        "server": server if "server" in (data.source, data.labels) else None,
        "responses": _described_file(Path(str(data.responses)), Path(data.dir)) if data.source == "file" else None,
        "generator": GENERATOR,
        "split": dict(split),
        "versions": {name: version(name) for name in _PACKAGES},
        "recorded": _recorded(pair, data),
    }


def _recorded(pair: PairConfig, data: DataConfig) -> dict[str, object]:
    """Facts about a run that are not compared."""
    return {
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "num_threads": pair.num_threads or torch.get_num_threads(),
        "engine": data.engine,
        "target_path": pair.target.path,
        "draft_path": pair.draft.path,
        "tp_plan": [pair.target.tp_plan, pair.draft.tp_plan],
        "attn_implementation": [pair.target.attn_implementation, pair.draft.attn_implementation],
        "command": sys.argv,
        **{name: version(name) for name in _WRITERS},
    }


def _described_file(path: Path, directory: Path) -> dict[str, int | str]:
    made = read_manifest(directory).get("responses") if (directory / "manifest.json").is_file() else None
    if made:
        with path.open("rb") as file:
            first = file.read(made["bytes"])
        if hashlib.sha256(first).hexdigest() != made["sha256"]:
            raise ValueError(
                f"{path} does not begin with the responses that {directory} was made from; restore that file, or "
                "choose another data.dir"
            )
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def read_manifest(directory: str | Path, *, command: str = "data", keys: Sequence[str] = ()) -> dict[str, Any]:
    """The manifest of a directory that `command` makes; ValueError if it is damaged or lacks one of `keys`."""
    path = Path(directory) / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: run `acceptance-heads {command}` with this config first")
    remedy = f"restore the original, or delete {directory} to start over"
    manifest = read_json(path, remedy=remedy, keys=keys)
    for name in _OBJECTS:
        if not isinstance(manifest.get(name, {}), dict):
            raise ValueError(f"{path}: {name} is {str(manifest[name])[:80]!r}, but must be an object; {remedy}")
    return manifest


def refuse_older(manifest: Manifest, directory: str | Path) -> None:
    """Raise ValueError for a directory that heads are to be trained on, but that only another version can read."""
    remedy = "make the data in another data.dir (`acceptance-heads responses` keeps the responses)"
    if (format_ := manifest.get("format", FORMAT)) != FORMAT:
        raise ValueError(f"{directory} has data format {format_}, but this version reads format {FORMAT}; {remedy}")
    if (mixes := manifest.get("mixes", 1)) != 1:
        raise ValueError(
            f"{directory} has {mixes} token mixings per response (data.mixes), but this version reads one; {remedy}"
        )


def settle(directory: str | Path, manifest: Manifest, *, setting: str = "data.dir") -> None:
    """Write the manifest into a new directory; ValueError for the first key that differs from an existing one."""
    path = Path(directory) / "manifest.json"
    if not path.exists():
        write_atomic(path, json.dumps(manifest, indent=2).encode())
        return
    on_disk = read_manifest(directory)
    refuse_different(on_disk, manifest, directory, setting=setting)
    grown = {"responses": manifest["responses"]} if manifest.get("responses") else {}
    if manifest.get("split_by"):
        grown["split_by"] = manifest["split_by"] | on_disk.get("split_by", {})
    if "split" in manifest:
        parts = manifest["split"].items()
        larger = {name: part for name, part in parts if num_prompts(on_disk, name) <= part["prompts"]}
        grown["split"] = on_disk.get("split", {}) | larger
    if any(on_disk.get(name) != value for name, value in grown.items()):
        if "recorded" in manifest:
            grown["recorded"] = manifest["recorded"] | {"earlier": on_disk.get("recorded")}
        write_atomic(path, json.dumps(on_disk | grown, indent=2).encode())


def refuse_different(
    on_disk: Manifest, manifest: Manifest, directory: str | Path, *, setting: str = "data.dir"
) -> None:
    """Raise ValueError for the first key in which a run's manifest differs from that of an existing directory."""
    in_run = json.loads(json.dumps(manifest))  # tuples become lists
    # data of earlier versions has a number of token mixings per response, which is 1 now, and describes hidden states
    earlier = {name: value for name, value in on_disk.items() if name not in _OF_STATES}
    if difference := next(_differences({"mixes": 1} | earlier, {"mixes": 1} | in_run), None):
        raise ValueError(
            f"{Path(directory) / 'manifest.json'} differs in {difference}; choose another {setting}"
            f"{_REUSE if setting == 'data.dir' else ''}, or delete {directory} to start over"
        )


def num_prompts(manifest: Manifest, split: str) -> int:
    """Prompts of a split that the largest run in a directory requested; 0 for imported data."""
    part = manifest.get("split", {}).get(split, {})
    num = part.get("prompts", 0) if isinstance(part, dict) else None
    if type(num) is not int:
        raise ValueError(f"manifest.json: split.{split} is {part!r:.80}, but must be a number of prompts")
    return num


def _differences(on_disk: object, in_run: object, key: str = "") -> Iterator[str]:
    """A description of each entry that differs; `key` is the dotted path of what is compared."""
    if isinstance(on_disk, dict) and isinstance(in_run, dict):
        skipped = set() if key else {"recorded", *_GROWING}
        for name in dict.fromkeys(name for name in [*on_disk, *in_run] if name not in skipped):
            yield from _differences(on_disk.get(name), in_run.get(name), f"{key}.{name}" if key else name)
    elif on_disk is not None or key not in _COMMITS:
        parts = [str(value).split(".")[:2] if key.startswith("versions.") else value for value in (on_disk, in_run)]
        if parts[0] != parts[1]:
            yield f"{key}: {on_disk!r} there, {in_run!r} in this run"


def tokenizer_text(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A tokenizer as JSON: all of it, or its vocabulary if it has no serialised form."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))


def digest(text: str) -> str:
    """sha256 of a text, as hexadecimal digits."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def git_commit() -> str | None:
    """The commit of the project's checkout; None where it is installed without git."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            encoding="utf-8",
            timeout=10,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
