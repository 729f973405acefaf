"""The data stage against the official shape of the same work, its memory, and labelling against bare forwards.

    python -m tests.benchmarks.data_gen --config configs/tiny.yaml [--rows 48] [--repeats 3]

official   as the released SpecDec++ code does it: one prompt at a time, `generate`, then a draft pass that draws Y, a draft pass and a
           target pass that read log probabilities, whole [positions, vocabulary] each time; JSON with lists as strings at the end
ours       `python -m data_gen` on the same prompts, with both feature sets, which the official code leaves to training

The arms are interleaved, every repeat has prompts of its own, and medians are reported. Rows per second count the same prompts in both
arms; tokens are those that an arm generated. Peak memory is that of a fresh process with 1, 4 and 16 times the rows. The last line is one
JSON document.
"""

import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch

from configs.command import run
from configs.schema import Config
from data_gen.labels.labeller import Labeller
from data_gen.pipeline import stages
from data_gen.pipeline.command import make
from data_gen.pipeline.worker import Job, Worker
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode
from data_gen.responses.conversation import ShardSpec, ask
from data_gen.responses.exchange import Exchange
from data_gen.store.shards import read_sidecar, rows_path
from lm import forwards

_OFFICIAL_COLUMNS = {"prompt", "prompt_ids", "response_ids", "draft_ids", "log_p", "log_q", "acceptance_prob"}
_MEMORY_ROWS, _MEMORY_TOKENS = 16, 16


def official(prompts: list[Prompt], worker: Worker, path: Path) -> None:
    """The official shape, from prompts to a JSON file."""
    data, sampling, target, draft = worker.data, worker.labeller.sampling, worker.labeller.target, worker.labeller.draft
    settings = {"do_sample": True, "temperature": sampling.temperature or 1.0, "top_k": sampling.top_k or 0}
    items = []
    with torch.inference_mode():
        for prompt in prompts:
            prefix = encode(prompt, worker.tokenizer, data.template)
            ids = torch.tensor([prefix])
            settings["max_new_tokens"] = data.max_new_tokens
            whole = target.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
            tokens = whole[0, len(prefix) :]
            span = slice(len(prefix) - 1, -1)
            drawn = torch.multinomial(draft(input_ids=whole).logits[0].softmax(-1), 1)[span]
            log_q, log_p = (model(input_ids=whole).logits[0].log_softmax(-1)[span].gather(-1, drawn)[:, 0] for model in (draft, target))
            item = {"prompt": prompt.text, "prefix": prefix, "tokens": tokens.tolist(), "continuation": worker.tokenizer.decode(tokens)}
            item |= {"draft": drawn[:, 0].tolist(), "log_p_7b": log_q.tolist(), "log_p_70b": log_p.tolist()}
            item["p_acc"] = (log_p - log_q).clamp(max=0).exp().tolist()
            items.append({key: str(value) if isinstance(value, list) else value for key, value in item.items()})
    path.write_text(json.dumps(items, indent=2))


class Seconds(NamedTuple):
    """What some work took."""

    wall: float
    cpu: float
    """Of this process alone, which other load on the machine hardly changes."""


def time_of(work: Callable[[], Any]) -> Seconds:
    """How long `work` takes."""
    start, start_cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - start, time.process_time() - start_cpu)


def column_bytes(path: Path) -> int:
    """Bytes on disk of the columns that the official JSON has too."""
    metadata = pq.ParquetFile(path).metadata
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    return sum(column.total_compressed_size for column in columns if column.path_in_schema.split(".")[0] in _OFFICIAL_COLUMNS)


def compare(worker: Worker, prompts: list[list[Prompt]], folder: Path) -> dict[str, float]:
    """Rows and tokens per second and bytes per row of both arms."""
    seconds: dict[str, list[Seconds]] = {"official": [], "ours": []}
    tokens = {"official": 0, "ours": 0}
    json_path, num_rows = folder / "official.json", len(prompts[0])
    rows_bytes = all_bytes = json_bytes = 0
    for index, group in enumerate(prompts):
        seconds["official"].append(time_of(lambda group=group: official(group, worker, json_path)))
        tokens["official"] += sum(len(json.loads(item["tokens"])) for item in json.loads(json_path.read_text()))
        json_bytes += json_path.stat().st_size
        spec = ShardSpec("train", index, tuple(group))
        seconds["ours"].append(time_of(lambda spec=spec: worker.make(spec, lambda count: None)))
        path = rows_path(worker.data.dir, "train", index)
        tokens["ours"] += read_sidecar(path)["tokens"]
        rows_bytes += column_bytes(path)
        all_bytes += path.stat().st_size
    ratios = [theirs.wall / ours.wall for theirs, ours in zip(seconds["official"], seconds["ours"], strict=True)]
    cpu_ratios = [theirs.cpu / ours.cpu for theirs, ours in zip(seconds["official"], seconds["ours"], strict=True)]
    total = num_rows * len(prompts)
    return {
        **{f"{arm}_rows_per_s": num_rows / statistics.median(spent.wall for spent in times) for arm, times in seconds.items()},
        **{f"{arm}_tokens_per_s": tokens[arm] / sum(spent.wall for spent in times) for arm, times in seconds.items()},
        "rows_per_s_ratio": statistics.median(ratios),
        "rows_per_s_ratio_min": min(ratios),
        "rows_per_s_ratio_max": max(ratios),
        "rows_per_cpu_s_ratio": statistics.median(cpu_ratios),
        "official_bytes_per_row": json_bytes / total,
        "ours_bytes_per_row": rows_bytes / total,
        "ours_bytes_per_row_with_every_column": all_bytes / total,
        "bytes_per_token_ratio": rows_bytes / tokens["ours"] / (json_bytes / tokens["official"]),
    }


def bare_forwards(labeller: Labeller, exchanges: list[Exchange], size: int) -> None:
    """Nothing but the forwards that labels and fed-time features need, with logits only where they are used."""
    order = sorted(exchanges, key=lambda exchange: -len(exchange.prompt_ids) - len(exchange.response_ids))
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        prompts = [exchange.prompt_ids for exchange in batch]
        whole = [exchange.prompt_ids + exchange.response_ids for exchange in batch]
        for model in (labeller.draft, labeller.target):
            hidden = forwards.hidden_states(model, [ids[:-1] for ids in whole], [len(ids) - 1 for ids in prompts])
            for chunk in forwards.chunks(len(hidden), forwards.chunk_rows(labeller.vocab_size, labeller.chunk_mb)):
                forwards.logits_of(model, hidden[chunk], labeller.vocab_size)
        forwards.hidden_states(labeller.draft, whole, [len(ids) for ids in prompts])


def labelling(worker: Worker, spec: ShardSpec, repeats: int) -> dict[str, float]:
    """Labels, both feature sets and their files, as a fraction of the bare forwards' throughput."""
    data, labeller = worker.data, worker.labeller
    answers = ask(spec, worker.source, tokenizer=worker.tokenizer, data=data, progress=lambda count: None)
    exchanges = answers.exchanges
    num_tokens = sum(len(exchange.response_ids) for exchange in exchanges)

    def label() -> None:
        columns = stages.label_and_mix(spec, exchanges, labeller=labeller, data=data, progress=lambda count: None)
        stages.write_files(spec, answers, columns=columns, data=data)

    def bare() -> None:
        bare_forwards(labeller, exchanges, data.batch_size)

    bare()
    label()
    pairs = [(time_of(bare).wall, time_of(label).wall) for _ in range(2 * repeats + 1)]
    return {
        "bare_tokens_per_s": num_tokens / statistics.median(first for first, _ in pairs),
        "labelling_tokens_per_s": num_tokens / statistics.median(second for _, second in pairs),
        "labelling_fraction_of_bare": statistics.median(first / second for first, second in pairs),
    }


def peak_memory(config: Config, times: int, folder: Path) -> float:
    """MiB of a process that makes `times` as many rows, in shards of one size."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            data = replace(
                config.data,
                dir=str(folder / f"memory-{times}"),
                num_train=_MEMORY_ROWS * times,
                num_dev=0,
                num_test=0,
                rows_per_shard=_MEMORY_ROWS,
                max_new_tokens=_MEMORY_TOKENS,
            )
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            make(replace(config, data=data))
            status = 0
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        raise RuntimeError(f"the memory run of {times} x {_MEMORY_ROWS} rows failed")
    return usage.ru_maxrss / 1024


def data_gen(config: Config, *, rows: int = 48, repeats: int = 3) -> dict[str, Any]:
    """Measure the data stage.

    Args:
        rows: prompts per arm and repeat.
        repeats: interleaved pairs of arms.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = replace(config, data=replace(config.data, dir=str(folder / "ours"), num_train=rows * repeats + 2))
        memory = {f"peak_memory_{times}x_mib": peak_memory(config, times, folder) for times in (1, 4, 16)}
        prompts = load_prompts(config.data, "train")
        worker = Worker(Job(pair=config.pair, data=config.data, stage="together"))
        official(prompts[-2:], worker, folder / "warm.json")
        worker.make(ShardSpec("train", 99, tuple(prompts[-2:])), lambda count: None)
        groups = [prompts[rows * index : rows * (index + 1)] for index in range(repeats)]
        result: dict[str, Any] = compare(worker, groups, folder)
        result |= labelling(worker, ShardSpec("test", 0, tuple(groups[0])), repeats) | memory
    result["peak_memory_16x_over_1x"] = memory["peak_memory_16x_mib"] / memory["peak_memory_1x_mib"]
    result |= {
        "rows": rows,
        "repeats": repeats,
        "target": config.pair.target.path,
        "num_threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip(),
    }
    for key, value in result.items():
        print(f"  {key:<30} {value:,.3f}" if isinstance(value, float) else f"  {key:<30} {value}")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    run({"data_gen": data_gen}, default="data_gen")
