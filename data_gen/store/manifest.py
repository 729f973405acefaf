"""manifest.json: what the files of a directory were made from, so that a run with other settings refuses to add shards
of its own.

`settle` and `read_manifest` serve every directory of shards, also those of traces. Everything that decides the rows is
compared; what grows (the prompts of a split, a file of responses that is appended to) as far as it was there before.
The entry `recorded` is not compared: git commit, machine, thread count, engine, and the paths of local models, whose
weights are compared instead. Batch and chunk sizes change rows through the rounding of forwards alone, and stand in
each shard's sidecar. Equal manifests and sizes promise equal bytes on equal hardware with the same thread count only;
else rows follow the same law.
"""

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema import DataConfig, PairConfig
from data_gen.prompts.splits import Split
from data_gen.store.identity import describe_model, file_sha256
from lm.features.released import released_layout_of
from lm.uniforms import GENERATOR
from store.json_files import read_json
from store.shards import write_atomic

FORMAT = 1
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow")
_UNCOMPARED = {"dir", "engine", "ray", "server", "responses", "split_ids", "batch_size", "chunk_mb", "max_error_share"}
_UNCOMPARED |= {"num_train", "num_dev", "num_test", "labels"}
_OF_SERVER = ("model", "kind", "prompt_as", "extra")
"""Settings that the responses of a server depend on."""
_OBJECTS = ("target", "draft", "sampling", "split", "recorded")
_SIZES = ("prompts", "bytes")
_GROWING = ("split", "responses")
"""Entries of parts, to which a later run may append."""

_LABELS_ANEW = " (`acceptance-heads responses` lets it label the responses that are there)"

Parts = list[dict[str, Any]]
"""Sources of a directory, and of each time that it grew: sizes, with the sha256 of everything up to there."""


def make_manifest(
    pair: PairConfig,
    data: DataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    split: Mapping[Split, Parts],
    num_prompts: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The manifest of a run, before any model is loaded.

    Args:
        pair: section of the config.
        data: section of the config, its sizes settled.
        tokenizer: the pair's.
        split: the prompts of the run, as `data_gen.pipeline.growth` describes them.
        num_prompts: path of each file of prompts -> prompts in it.
    """
    is_served = "server" in (data.source, data.labels)
    return {
        "format": FORMAT,
        "target": describe_model(pair.target),
        "draft": describe_model(pair.draft),
        "tokenizer": digest(_tokenizer_text(tokenizer)),
        "chat_template": digest(str(tokenizer.chat_template)) if data.template == "chat" else None,
        "sampling": asdict(pair.sampling),
        **{name: value for name, value in asdict(data).items() if name not in _UNCOMPARED},
        "draft_length": data.draft_length if released_layout_of(pair.draft) else None,
        # null as in directories that were made before there was a choice
        "draft_every": data.draft_every if data.draft_every > 1 and released_layout_of(pair.draft) else None,
        "labels": data.labels if data.labels == "server" else None,
        "server": {name: asdict(data.server)[name] for name in _OF_SERVER} if is_served else None,
        "responses": _file_parts(Path(str(data.responses)), Path(data.dir)) if data.source == "file" else None,
        "generator": GENERATOR,
        "split": dict(split),
        "versions": {name: _version(name) for name in _PACKAGES},
        "recorded": _recorded(pair, data) | {"num_prompts": dict(num_prompts or {})},
    }


def _recorded(pair: PairConfig, data: DataConfig) -> dict[str, Any]:
    """What a manifest says of a run, and no later run is compared with."""
    return {
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "num_threads": pair.num_threads or torch.get_num_threads(),
        "engine": data.engine,
        "target_path": pair.target.path,
        "draft_path": pair.draft.path,
        **_of_forwards(pair),
        "command": sys.argv,
    }


def _of_forwards(pair: PairConfig) -> dict[str, list[str | None]]:
    """Settings of target and draft that change the rounding of forwards alone."""
    names = ("tp_plan", "attn_implementation")
    return {name: [getattr(source, name) for source in (pair.target, pair.draft)] for name in names}


def _file_parts(path: Path, directory: Path) -> Parts:
    """A file of responses up to each size that it had when the directory was made or grew, and up to its end."""
    on_disk = (read_manifest(directory).get("responses") or []) if (directory / "manifest.json").is_file() else []
    sizes = [*(part["bytes"] for part in on_disk), path.stat().st_size]
    return [{"bytes": size, "sha256": file_sha256(path, size)} for size in dict.fromkeys(sizes)]


def read_manifest(directory: str | Path, *, command: str = "data", keys: Sequence[str] = ()) -> dict[str, Any]:
    """The manifest of a directory of shards.

    Args:
        directory: the folder of the shards.
        command: the command of `acceptance-heads` that makes such a directory, for the message.
        keys: the entries that the caller reads.

    Raises:
        FileNotFoundError: nothing has been made there.
        ValueError: it is broken.
    """
    path = Path(directory) / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: run `acceptance-heads {command}` with this config first")
    remedy = f"put the original back, or delete {directory} to start anew"
    manifest = read_json(path, remedy=remedy, keys=keys)
    for name in _OBJECTS:
        if not isinstance(manifest.get(name, {}), dict):
            raise ValueError(f"{path}: {name} is {str(manifest[name])[:80]!r}, and an object is expected; {remedy}")
    if not all(_are_parts(parts) for parts in (*manifest.get("split", {}).values(), manifest.get("responses") or [])):
        raise ValueError(f"{path}: split or responses is no list of parts with their sha256; {remedy}")
    return manifest


def _are_parts(parts: Any) -> bool:
    """Whether something read from JSON has the form of `Parts`."""
    return isinstance(parts, list) and all(
        isinstance(part, dict) and "sha256" in part and all(isinstance(part.get(name, 0), int) for name in _SIZES)
        for part in parts
    )


def settle(directory: str | Path, manifest: Mapping[str, Any], *, setting: str = "data.dir") -> None:
    """Write the manifest into a new directory, or compare it with the one in an old directory.

    Args:
        directory: the folder, which is made if it is not there.
        manifest: the manifest of this run.
        setting: the key of the config that names the directory.

    Raises:
        ValueError: names the first key that differs, and both values.
    """
    # through JSON: tuples become lists
    path, in_run = Path(directory) / "manifest.json", json.loads(json.dumps(manifest))
    if not path.exists():
        write_atomic(path, json.dumps(manifest, indent=2).encode())
        return
    on_disk = read_manifest(directory)
    if difference := next(_differences(on_disk, in_run), None):
        if difference.startswith("split.") and (changed := _changed_files(on_disk, in_run)):
            difference = f"its prompts: {changed}; put the earlier file back, or"
        else:
            difference += ";"
        raise ValueError(
            f"{path} differs in {difference} choose another {setting}"
            f"{_LABELS_ANEW if setting == 'data.dir' else ''}, or delete {directory} to start anew"
        )
    if any(in_run.get(name) and on_disk.get(name) != in_run[name] for name in _GROWING):
        grown = {name: in_run[name] for name in _GROWING if name in in_run}
        recorded = in_run["recorded"] | {"earlier": on_disk.get("recorded")}
        write_atomic(path, json.dumps(on_disk | grown | {"recorded": recorded}, indent=2).encode())


def _changed_files(on_disk: Mapping[str, Any], in_run: Mapping[str, Any]) -> str:
    """The files of prompts in words: those whose number of prompts is another than then, or else all of them."""
    then, now = (manifest.get("recorded", {}).get("num_prompts", {}) for manifest in (on_disk, in_run))
    if not then:  # made before these numbers were kept
        num_used = sum(parts[-1]["prompts"] for parts in on_disk["split"].values())
        return ", ".join(
            f"{path} has changed: at least {num_used:,} rows then, {num:,} now" for path, num in now.items()
        )
    changed = {path: num for path, num in now.items() if then.get(path) != num} or now
    return ", ".join(
        f"{path} has changed: {then.get(path, 0):,} rows then, {num:,} now" for path, num in changed.items()
    )


def _differences(on_disk: Any, in_run: Any, key: str = "") -> Iterator[str]:
    """Compared entries that differ, in the order on disk, in words; `key` is the dotted path of what is compared."""
    if isinstance(on_disk, dict) and isinstance(in_run, dict):
        for name in (name for name in dict.fromkeys([*on_disk, *in_run]) if key or name != "recorded"):
            yield from _differences(on_disk.get(name), in_run.get(name), f"{key}.{name}" if key else name)
    elif key.split(".")[0] in _GROWING and isinstance(on_disk, list) and isinstance(in_run, list):
        for index, part in enumerate(on_disk):
            yield from _differences(part, in_run[index] if index < len(in_run) else None, f"{key}.{index}")
    elif on_disk != in_run:
        yield f"{key}: {on_disk!r} there, {in_run!r} in this run"


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides how text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))


def digest(text: str) -> str:
    """sha256 of a text, as hexadecimal digits."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of the project's checkout; None where it is installed without git."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
