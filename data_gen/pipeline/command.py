"""`acceptance-heads data`: check the config, settle the manifest, make missing shards, account for every prompt."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from configs.hints import say_next
from configs.load import accepts_yaml
from configs.schema import Config, DataConfig, PairConfig
from data_gen.pipeline.checks import check_lengths, check_settings, hint_at_few
from data_gen.pipeline.on_ray import run_on_actors
from data_gen.pipeline.share import Share, begin, in_lockstep, share_of
from data_gen.pipeline.stages import (
    Stage,
    forget_short,
    forget_stages,
    is_done,
    refuse_other_prompts,
    settled,
    shards_of,
    stage_before,
    stages_of,
)
from data_gen.pipeline.worker import Job, Worker
from data_gen.prompts.sets import SPLITS, split_by, unreadable
from data_gen.prompts.templates import show_first
from data_gen.responses.exchange import ShardSpec
from data_gen.store.manifest import make_manifest, read_manifest, refuse_different, settle
from data_gen.store.rows import account
from lm import load_pair_tokenizer
from lm.pair import free_memory
from lm.parallel import sliced_models
from store.progress import Bar
from store.shards import DATA_FOLDERS, clean_partial, forget_broken, is_whole, shard_path, shards_in, write_atomic


@accepts_yaml
def make(
    config: Config,
    *,
    retry_errors: bool = False,
    stages: Literal["all", "respond", "draft", "target"] = "all",
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Run `acceptance-heads data`; `configs.making` documents its flags."""
    if sliced_models(config.pair) and rank is None and world_size is None:
        rank, world_size = 0, 1  # torchrun's variables count slices
    share = share_of(rank, world_size)
    if config.data.engine == "ray" and not share.is_whole:
        raise ValueError(
            f"data.engine is ray, which needs a single process, and this process is {share}; set data.engine: local, "
            "or start one process (--rank 0 --world_size 1)"
        )
    check_settings(config.pair, config.data)
    with in_lockstep(config.pair) as is_leader:
        if is_leader:
            _make(config, share, retry_errors=retry_errors, stages=stages)


def _make(config: Config, share: Share, *, retry_errors: bool, stages: str) -> None:
    data = settled(config.data)
    requested = _requested(stages, data, retry_errors=retry_errors)
    all_specs = shards_of(data)
    hint_at_few(sum(len(spec.prompts) for spec in all_specs), "data.prompts")
    sizes: dict[str, object] = {split: _size([spec for spec in all_specs if spec.split == split]) for split in SPLITS}
    tokenizer = load_pair_tokenizer(config.pair)
    manifest = make_manifest(config.pair, data, tokenizer=tokenizer, split=sizes) | {"split_by": split_by(data)}
    check_lengths(config.pair, data)  # before the manifest is written, which the remedy would change
    if share.rank == 0:
        show_first((prompt for spec in all_specs for prompt in spec.prompts), tokenizer, data.template)
    with ExitStack() as work:
        with share.first_turn(data, work):  # other processes wait here, so slow work (prompts, hashes) is done before
            clean_partial(data.dir, names=("manifest", "errors"))
            if (Path(data.dir) / "manifest.json").is_file():
                refuse_different(read_manifest(data.dir), manifest, data.dir)
            refuse_other_prompts(all_specs, data)  # before the manifest says how these prompts are split
            settle(data.dir, manifest)
        specs = share.of(all_specs)
        forget_short(specs, data)
        if not share.is_whole:
            print(f"{data.dir}: {share} makes {len(specs)} of {len(all_specs)} shards")
        names = {spec.name for spec in specs}
        forget_broken(path for path in shards_in(data.dir, DATA_FOLDERS) if path.stem in names)
        num_made = _complete(share.on_its_gpu(config.pair), data, specs, stages=requested, retry_errors=retry_errors)
        clean_partial(data.dir, *DATA_FOLDERS, names=None if share.is_whole else names)  # of killed runs and actors
        with share.last_turn(data.dir, work) as num_others:
            maker = "made" if share.is_whole else f"{share} made"
            done = f"{data.dir}: {maker} {num_made} shards (stages: {', '.join(requested)})"
            missing = [spec.name for spec in all_specs if not is_done(spec, data)]
            if num_others:
                others = "other process still runs" if num_others == 1 else "other processes still run"
                print(f"{done}; {num_others} {others}, and the last one reports")
            elif missing:
                print(f"{done}; {len(missing)} shards are incomplete, the first is {missing[0]}")
            else:
                _account(data, all_specs, num_made)
                say_next(config, "train")
    if requested == stages_of(data):
        share.wait_for_others(data.dir, lambda: all(is_done(spec, data) for spec in all_specs))


def _size(specs: Sequence[ShardSpec]) -> dict[str, object]:
    """Number of prompts of a split and, if there are several, of each set, for the manifest."""
    sets = Counter(prompt.set for spec in specs for prompt in spec.prompts if prompt.set)
    return {"prompts": sum(len(spec.prompts) for spec in specs), **({"sets": dict(sets)} if sets else {})}


def _requested(stages: str, data: DataConfig, *, retry_errors: bool) -> tuple[Stage, ...]:
    if stages == "all":
        return stages_of(data)
    if retry_errors:
        raise ValueError(f"--retry_errors runs all stages, but --stages is {stages}; remove one of them")
    if stages not in stages_of(data):
        raise ValueError(
            f"--stages is {stages}, but with data.labels: {data.labels} and data.mode: {data.mode} the stages are "
            f"{', '.join(stages_of(data))}; choose one of these, or change these settings"
        )
    return tuple(stage for stage in stages_of(data) if stage == stages)


def _complete(
    pair: PairConfig, data: DataConfig, specs: Sequence[ShardSpec], *, stages: Sequence[Stage], retry_errors: bool
) -> int:
    """Make the missing shards, and with `retry_errors` those with errors; returns their number."""
    missing = [spec for spec in specs if not is_done(spec, data)]
    done = [spec for spec in specs if retry_errors and spec not in missing]
    retried = [spec for spec in done if account([shard_path(data.dir, "rows", spec.split, spec.index)])[0]["error"]]
    num_made = 0
    for stage in stages:
        if unfinished := [spec for spec in missing if not is_done(spec, data, stage)]:
            previous = stage_before(stage, data)
            lacking = [spec for spec in unfinished if previous is not None and not is_done(spec, data, previous)]
            if lacking:
                raise ValueError(
                    f"stage {stage} needs stage {previous}, which is missing for {len(lacking)} shards of "
                    f"{data.dir} (the first is {lacking[0].name}); run --stages {previous} to completion first"
                )
            _run(Job(pair=pair, data=data, stage=stage), unfinished)
            num_made = max(num_made, len(unfinished))
        if retried:
            _run(Job(pair=pair, data=data, stage=stage, keeps_responses=True), retried)
    return num_made + len(retried)


def _run(job: Job, specs: Sequence[ShardSpec]) -> None:
    begin(job, specs)
    total = sum(spec.num_requests for spec in specs)
    with Bar(total=total, unit="rows", desc=f"{job.stage}: loading models") as bar:
        if job.data.engine == "ray":
            run_on_actors(job, specs, bar)
            return
        Worker(job).run(
            specs,
            progress=lambda count: bar.update(count / job.num_steps),
            begins=lambda name: bar.set_description(f"{job.stage}: {name}"),
        )
    free_memory()  # the next stage loads other models


def _account(data: DataConfig, specs: Sequence[ShardSpec], num_made: int) -> None:
    """Count all prompts, write errors.jsonl and print the totals.

    Raises:
        ValueError: more errors than data.max_error_share allows, or no row.
    """
    forget_stages(specs, data)
    for folder in (*Path(data.dir).glob("stages/*"), Path(data.dir, "stages")):
        with suppress(OSError):  # it is absent, or has results of another run
            folder.rmdir()
    folder = Path(data.dir, "rows")
    paths = [path for split in SPLITS for path in sorted(folder.glob(f"{split}-*.parquet")) if is_whole(path)]
    totals, problems = account(paths)
    unread, num_records = unreadable(data)
    records = [{"id": where, "outcome": "error", "reason": reason, "shard": None} for where, reason in unread.items()]
    lines = "".join(json.dumps(record) + "\n" for record in [*records, *problems])
    write_atomic(Path(data.dir, "errors.jsonl"), lines.encode())
    if len(paths) > len(specs):
        print(
            f"{data.dir}: {len(paths) - len(specs)} shards of a larger earlier run stay; training reads them too, up "
            "to heads.num_train"
        )
    print(
        f"{data.dir}: {totals['ok']:,} rows, {totals['tokens']:,} tokens in {len(paths)} shards "
        f"({num_made} made in this run); of {totals['input']:,} prompts, {totals['error']:,} failed and "
        f"{totals['skipped']:,} were skipped (see errors.jsonl)"
    )
    if unread:
        count = f"{len(unread):,} of {num_records:,} records of data.prompts are unreadable"
        print(f"{data.dir}: {count} (errors.jsonl)")
        if len(unread) > data.max_error_share * num_records:
            raise ValueError(f"{count}, {_above_share(data)}; see {data.dir}/errors.jsonl")
    _refuse_failures(data, totals, problems)


def _above_share(data: DataConfig) -> str:
    return f"above data.max_error_share {data.max_error_share:g}; all other data is written"


def _refuse_failures(data: DataConfig, totals: Mapping[str, int], problems: Sequence[Mapping[str, object]]) -> None:
    """Raise ValueError for more errors than data.max_error_share allows, or if no prompt became a row."""
    if totals["error"] > data.max_error_share * totals["input"]:
        raise ValueError(
            f"{totals['error']:,} of {totals['input']:,} prompts ended in an error, {_above_share(data)}; fix the "
            f"causes in {data.dir}/errors.jsonl, then run the same command with --retry_errors"
        )
    if problems and not totals["ok"]:
        raise ValueError(
            f"none of {totals['input']:,} prompts became a row: {totals['error']:,} failed and {totals['skipped']:,} "
            f"were skipped; the first reason: {problems[0]['reason']}"
        )
