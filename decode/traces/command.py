"""python -m decode trace: record once, replay everything (law 4.10).

Per shard: the target answers its prompts in one batch (`data_gen`), then each response becomes a trace row. All chance comes from seeds of
(run seed, dataset, split, shard index), so an interrupted run resumes to the same trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from configs.schema import Config
from data_gen.pipeline.command import cut
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.splits import Split
from data_gen.responses.conversation import ShardSpec, ask
from data_gen.responses.exchange import Exchange
from data_gen.responses.in_process import TargetInProcess
from data_gen.store.manifest import describe_model, read_manifest, settle
from data_gen.store.shards import clean_partial, read_sidecar, write_atomic
from decode.traces import disk
from decode.traces.coupling import Recorder, Recording
from decode.traces.trace import TokenInputs, Trace, TraceRow, join
from heads.model.head import AcceptanceHead
from lm import Pair, Sampling, load_pair
from lm.uniforms import seed_of, uniforms

SPLITS: tuple[Split, ...] = ("dev", "test")
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n}/{total} prompts [{elapsed}<{remaining}]"


def record_trace(
    recorder: Recorder,
    exchanges: Sequence[Exchange],
    *,
    max_new_tokens: int,
    seed: int = 0,
    categories: Sequence[str] = (),
    progress: Callable[[int], None] = lambda count: None,
) -> Trace:
    """The trace of some responses of the target.

    Args:
        recorder: the models, the sampling and the longest draft.
        exchanges: prompts with responses that were drawn from the target under the recorder's sampling.
        max_new_tokens: the length limit that they were generated with.
        seed: of the outcomes and branches.
        categories: of the prompts; empty: none.
        progress: told after each response.

    Raises:
        ValueError: no exchanges.
    """
    traces = []
    width = max((len(exchange.response_ids) for exchange in exchanges), default=0)
    chance = uniforms(seed, len(exchanges), width, recorder.num_uniforms)
    for index, exchange in enumerate(exchanges):
        limit = max_new_tokens if exchange.finish_reason == "stop" else len(exchange.response_ids)
        category = categories[index] if categories else ""
        row = TraceRow(exchange.id, category, tuple(exchange.prompt_ids), tuple(exchange.response_ids), limit)
        recorded = recorder.record(exchange.prompt_ids, exchange.response_ids, limit, chance[index])
        traces.append(_trace_of(row, recorded, recorder))
        progress(1)
    return join(traces)


def trace(config: Config) -> None:
    """Record, or go on recording, the trace that evaluate, tune, report and tables replay."""
    directory = record(config)
    for dataset in datasets_of(config):
        for split in SPLITS:
            part = load_trace(config, dataset, split)
            print(
                f"{directory / dataset}: {split} {len(part.rows):,} responses, {part.num_positions:,} tokens, "
                f"{part.is_rejected.mean():.3f} rejected, {len(part.token) - part.num_positions:,} tokens in branches"
            )


def record(config: Config) -> Path:
    """Record what is missing; the trace's directory. No model is loaded when nothing is."""
    directory = Path(config.decode.dir) / "trace"
    shards = shards_of(config)
    missing = [shard for shard in shards if not disk.is_done(directory, shard.dataset, shard.spec.split, shard.spec.index)]
    if not missing:
        eos_ids = frozenset(read_manifest(directory, command="decode trace")["eos_ids"])
        settle(directory, _manifest(config, shards, eos_ids), setting="decode.dir")
        return directory
    total = sum(shard.spec.num_requests for shard in missing)
    with tqdm(total=total, desc="trace: loading models", bar_format=_BAR, mininterval=0.2) as bar:
        bar.refresh()
        pair = load_pair(config.pair)
        settle(directory, _manifest(config, shards, pair.eos_ids), setting="decode.dir")
        clean_partial(directory)
        heads = [AcceptanceHead.from_pretrained(path) for path in config.decode.heads]
        for shard in missing:
            bar.set_description(f"trace: {shard.dataset} {shard.spec.split}-{shard.spec.index:05d}")
            _record_shard(config, shard, pair, heads, bar.update)
    write_errors(directory, shards)
    return directory


@dataclass(frozen=True)
class TraceShard:
    """A shard of one dataset."""

    dataset: str
    source: str
    """As data.prompts takes it."""
    spec: ShardSpec


def datasets_of(config: Config) -> dict[str, str]:
    """Name of each dataset -> where its prompts come from."""
    sources = config.decode.datasets or (config.data.prompts,)
    names = [Path(source).stem for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"decode.datasets are {', '.join(sources)}: two have one name, which their folders are called by; rename a file")
    return dict(zip(names, sources, strict=True))


def shards_of(config: Config) -> list[TraceShard]:
    """Every shard of the trace, in order."""
    check(config)
    shards = []
    for name, source in datasets_of(config).items():
        data = replace(config.data, prompts=source, num_dev=config.decode.num_dev, num_test=config.decode.num_test)
        for split in SPLITS:
            shards += [TraceShard(name, source, spec) for spec in cut(split, load_prompts(data, split), config.decode.prompts_per_shard)]
    return shards


def load_trace(config: Config, dataset: str, split: str) -> Trace:
    """One split of one dataset, all its shards."""
    count = {"dev": config.decode.num_dev, "test": config.decode.num_test}[split]
    num_shards = -(-count // config.decode.prompts_per_shard)
    return disk.read_trace(Path(config.decode.dir) / "trace", dataset, split, num_shards)


def check(config: Config) -> None:
    """Raise ValueError for a setting that is out of range, before anything is loaded."""
    least = {"num_dev": 1, "num_test": 1, "max_draft_length": 1, "max_new_tokens": 1, "prompts_per_shard": 1}
    for name, limit in least.items():
        if getattr(config.decode, name) < limit:
            raise ValueError(f"decode.{name} is {getattr(config.decode, name)}; it must be at least {limit}")


def write_errors(directory: Path, shards: Sequence[TraceShard]) -> None:
    """errors.jsonl: the prompts that have no row, with the reason."""
    lines = []
    for shard in shards:
        rows_path, _ = disk.shard_paths(directory, shard.dataset, shard.spec.split, shard.spec.index)
        lines += read_sidecar(rows_path)["problems"]
    write_atomic(directory / "errors.jsonl", "".join(f"{_json(line)}\n" for line in lines).encode())


def _record_shard(config: Config, shard: TraceShard, pair: Pair, heads: Sequence[AcceptanceHead], progress: Callable[[int], None]) -> None:
    decode, spec = config.decode, shard.spec
    sampling = Sampling(**vars(config.pair.sampling))
    seed = seed_of(decode.seed, "trace", shard.dataset, spec.split, spec.index)
    data = replace(config.data, seed=seed, max_new_tokens=decode.max_new_tokens)
    source = TargetInProcess(
        pair.target,
        sampling,
        vocab_size=pair.vocab_size,
        eos_ids=pair.eos_ids,
        max_new_tokens=decode.max_new_tokens,
        batch_size=decode.prompts_per_shard,
    )
    exchanges, problems, _ = ask(spec, source, tokenizer=pair.tokenizer, data=data, progress=lambda count: None)
    progress(spec.num_requests - len(exchanges))
    recorder = Recorder(
        pair.draft,
        pair.target,
        sampling,
        pair.vocab_size,
        pair.eos_ids,
        decode.max_draft_length,
        decode.perfect_head,
        config.data.chunk_mb,
    )
    categories = {prompt.id: prompt.category for prompt in spec.prompts}
    part = None
    if exchanges:
        part = record_trace(
            recorder,
            exchanges,
            max_new_tokens=decode.max_new_tokens,
            seed=seed_of(seed, "outcomes"),
            categories=[categories[exchange.id.split("#")[0]] for exchange in exchanges],
            progress=progress,
        )
        if not decode.trace_hidden:
            for head in heads:
                part.logit(head)
            part = replace(part, inputs=None)
    disk.write_trace(
        Path(decode.dir) / "trace", shard.dataset, spec.split, spec.index, trace=part, problems=[problem._asdict() for problem in problems]
    )


def _trace_of(row: TraceRow, recorded: Recording, recorder: Recorder) -> Trace:
    arrays = {name: value.detach().cpu() for name, value in vars(recorded).items()}
    hidden = arrays.pop("hidden")
    token = arrays["token"].numpy()
    names = ("entropy", "max_prob", "log_token_prob", "acceptance_prob")
    return Trace(
        (row,),
        recorder.sampling,
        recorder.max_draft_length,
        token,
        np.isin(token, sorted(recorder.eos_ids)),
        {name: arrays[name].float().numpy() for name in names},
        arrays["is_rejected"].numpy(),
        arrays["acceptance_rate"].float().numpy(),
        arrays["branch_lengths"].numpy(),
        _inputs_of(recorder.draft, hidden, arrays["token"]),
    )


@torch.inference_mode()
def _inputs_of(draft: PreTrainedModel, hidden: torch.Tensor, token: torch.Tensor) -> TokenInputs:
    ids = token.unique()
    layer = draft.get_input_embeddings()
    return TokenInputs(hidden, ids, layer(ids.to(next(layer.parameters()).device)).cpu())


def _manifest(config: Config, shards: Sequence[TraceShard], eos_ids: frozenset[int]) -> dict[str, object]:
    """What decides the trace; compared when it is gone on with."""
    decode, data = config.decode, config.data
    prompts: dict[str, str] = {}
    for shard in shards:
        key = f"{shard.dataset}.{shard.spec.split}"
        prompts[key] = sha256((prompts.get(key, "") + repr(shard.spec.prompts)).encode()).hexdigest()
    return {
        "format": 1,
        "target": describe_model(config.pair.target, trust_remote_code=config.pair.trust_remote_code),
        "draft": describe_model(config.pair.draft, trust_remote_code=config.pair.trust_remote_code),
        "sampling": vars(config.pair.sampling),
        "eos_ids": sorted(eos_ids),
        "prompts": prompts,
        "template": data.template,
        "max_prompt_tokens": data.max_prompt_tokens,
        **{
            name: getattr(decode, name)
            for name in ("max_draft_length", "max_new_tokens", "seed", "prompts_per_shard", "trace_hidden", "perfect_head")
        },
        "heads": [] if decode.trace_hidden else list(decode.heads),
    }


def _json(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)
