"""A trace that can be published: prompts belong to whoever wrote them, and replay reads none."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from configs.paths import local_path
from store.shards import atomic_directory, read_sidecar, write_shard
from store.sums import check_sums

_FOUND_ANEW = ("shard", "bytes", "sha256")
"""Facts of a sidecar that belong to the file."""


def record(*, decode_dir: str, out: str) -> None:
    """Copy the trace of an evaluation, and the times beside it, without the prompts: with `--decode.as_recorded true`
    others then evaluate, replay and tune on it.

    Args:
        decode_dir: the decode.dir of the evaluation.
        out: the folder that becomes another decode.dir.
    """
    source, directory = Path(local_path(decode_dir, "--decode_dir")), Path(local_path(out, "--out"))
    if directory.exists():
        raise ValueError(f"{directory} is there already; choose another --out, or delete it")
    if not (source / "trace" / "manifest.json").is_file():
        raise FileNotFoundError(f"no {source}/trace/manifest.json; --decode_dir is the decode.dir of an evaluation")
    all_rows = sorted(source.glob("trace/*/rows/*.parquet"))
    check_sums([*all_rows, *source.glob("trace/*/signals/*.safetensors")], command="trace")
    with atomic_directory(directory) as unfinished:
        for path in (source / "costs.jsonl", source / "trace" / "manifest.json"):
            if path.is_file():
                (unfinished / path.relative_to(source)).parent.mkdir(exist_ok=True)
                shutil.copy(path, unfinished / path.relative_to(source))
        for folder in source.glob("trace/*/signals"):
            shutil.copytree(folder, unfinished / folder.relative_to(source))
        for path in all_rows:
            facts = {name: value for name, value in read_sidecar(path).items() if name not in _FOUND_ANEW}
            write_shard(unfinished / path.relative_to(source), _without_prompts(pq.read_table(path)), **facts)
    num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    print(f"{directory}: {len(all_rows)} shards without their prompts, {num_bytes / 1e6:.1f} MB")


def _without_prompts(rows: pa.Table) -> bytes:
    """The rows of a trace as Parquet, each with an empty prompt."""
    place = rows.schema.get_field_index("prompt_ids")
    nothing = pa.array([[]] * len(rows), type=rows.schema.field(place).type)
    sink = pa.BufferOutputStream()
    pq.write_table(rows.set_column(place, "prompt_ids", nothing), sink, compression="zstd")
    return bytes(sink.getvalue())
