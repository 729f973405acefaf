"""The prompts that the shards of a trace were recorded from. A trace grows only by prompts after those that it has.

The sidecar of a shard's rows has a digest of each of its prompts. A trace of format 1 has one hash per split instead,
over the prompts of all its shards; `upgrade` replaces it by digests if this run's prompts begin with those.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from data_gen.prompts.prompt import Prompt
from data_gen.responses.exchange import ShardSpec
from data_gen.store.manifest import Manifest, read_manifest
from evaluation.traces.disk import ShardKey
from store.shards import read_sidecar, sidecar_path, write_atomic

FORMAT = 2
"""Format of a trace: 2 has numbers of prompts in the manifest and digests beside the shards, 1 had hashes."""

Shards = Mapping[ShardKey, ShardSpec]


def numbers_of(shards: Shards) -> dict[str, dict[str, int]]:
    """The manifest's entry `split`: dataset.split -> its number of prompts, as {"prompts": number}."""
    return {name: {"prompts": len(prompts)} for name, prompts in _prompts_of(shards).items()}


def lacks(directory: Path, key: ShardKey, spec: ShardSpec) -> bool:
    """Whether a shard is missing or incomplete on disk, or has fewer prompts than `spec`."""
    if not key.is_done(directory):
        return True
    facts = read_sidecar(key.paths(directory)[0])
    return "prompts" in facts and len(facts["prompts"]) < len(spec.prompts)


def refuse_other_digests(directory: Path, shards: Shards) -> None:
    """Raise ValueError if a shard on disk was recorded from other prompts than those of the run."""
    for key, spec in shards.items():
        path = key.paths(directory)[0]
        recorded = read_sidecar(path, keys=("prompts",))["prompts"] if sidecar_path(path).is_file() else []
        num = min(len(recorded), len(spec.digests))
        if recorded[:num] != spec.digests[:num]:
            raise ValueError(
                f"{path} was recorded from other prompts than {key.dataset} has now for {key.split}; restore the "
                f"earlier prompts, choose another decode.dir, or delete {directory} to start over"
            )


def has_old_format(manifest: Manifest) -> bool:
    """Whether a trace has hashes of its prompts, as earlier versions wrote them."""
    return "split" not in manifest and "prompts" in manifest


def upgraded(manifest: Manifest, shards: Shards, directory: Path) -> Manifest:
    """The manifest of a trace in today's format; ValueError if it has format 1 and a hash that no first part of the
    run's prompts has.
    """
    if not has_old_format(manifest):
        return manifest
    prompts_of = _prompts_of(shards)
    size = manifest["prompts_per_shard"]
    split = {}
    for name, recorded in manifest["prompts"].items():
        num_shards = manifest["recorded"]["num_shards"][name]
        prompts = prompts_of.get(name, [])
        counts = range((num_shards - 1) * size + 1, min(num_shards * size, len(prompts)) + 1)
        number = next((count for count in counts if _hash_of(prompts[:count], size) == recorded), None)
        if number is None:
            raise ValueError(
                f"{directory / 'manifest.json'} differs in prompts.{name}: an earlier version recorded this trace, and "
                f"its {num_shards} shards of up to {size} prompts are not the first of the {len(prompts)} in this run; "
                "restore the earlier prompts and decode.num_dev, num_test and datasets, choose another decode.dir, or "
                f"delete {directory} to start over"
            )
        split[name] = {"prompts": number}
    kept = {name: value for name, value in manifest.items() if name not in ("prompts", "recorded")}
    return {**kept, "format": FORMAT, "split": split}


def upgrade(directory: Path, shards: Shards) -> None:
    """Rewrite manifest and sidecars of a trace of format 1; shards keep their bytes. The caller holds the lock."""
    manifest = read_manifest(directory, command="trace")
    new = upgraded(manifest, shards, directory)
    for key, spec in shards.items():
        sidecar = sidecar_path(rows := key.paths(directory)[0])
        if sidecar.is_file() and "prompts" not in (facts := read_sidecar(rows)):
            start = key.shard * manifest["prompts_per_shard"]
            num = new["split"][f"{key.dataset}.{key.split}"]["prompts"] - start
            write_atomic(sidecar, json.dumps(facts | {"prompts": spec.digests[:num]}, indent=1).encode())
    write_atomic(directory / "manifest.json", json.dumps(new, indent=2).encode())


def _prompts_of(shards: Shards) -> dict[str, list[Prompt]]:
    """dataset.split -> the prompts of its shards."""
    prompts: dict[str, list[Prompt]] = {}
    for key, spec in shards.items():
        if not key.draw:
            prompts.setdefault(f"{key.dataset}.{key.split}", []).extend(spec.prompts)
    return prompts


def _hash_of(prompts: list[Prompt], size: int) -> str:
    """The hash in a manifest of format 1: a chain over the shards."""
    chain = ""
    for start in range(0, len(prompts), size):
        chain = sha256((chain + repr(tuple(prompts[start : start + size]))).encode()).hexdigest()
    return chain
