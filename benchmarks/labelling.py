"""Labels and features against the bare forwards that they need, and the memory of data generation.

    python -m benchmarks.labelling --config configs/tiny.yaml [--rows 48] [--repeats 3]

Bare forwards and labelling take turns, and medians of their CPU time are reported. Peak memory is that of a fresh
process with 1, 4 and 16 times the rows. The last line is one JSON document.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.where import measured_where
from configs.command import run
from configs.schema import Config
from data_gen.labels.labeller import Labeller
from data_gen.pipeline import stages
from data_gen.pipeline.command import make
from data_gen.pipeline.worker import Job, Worker
from data_gen.prompts.pool import load_prompts
from data_gen.responses.conversation import ShardSpec, ask
from data_gen.responses.exchange import Exchange
from evaluation.turns import in_turns
from lm import forwards

_MEMORY_ROWS, _MEMORY_TOKENS = 16, 16


def cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this process so far."""
    start = time.process_time()
    work()
    return time.process_time() - start


def bare_forwards(labeller: Labeller, exchanges: list[Exchange], size: int) -> None:
    """Run nothing but the forwards that labels and fed-time features need, with logits only where they are used."""
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
        labelled = stages.label_and_mix(spec, exchanges, labeller=labeller, data=data, progress=lambda count: None)
        stages.write_files(spec, answers, columns=labelled.columns, data=data)

    def bare() -> None:
        bare_forwards(labeller, exchanges, data.batch_size)

    bare()
    label()
    turns = [
        {work: cpu_seconds(work) for work in order} for _, order in in_turns((bare, label), range(2 * repeats + 1))
    ]
    return {
        "bare_tokens_per_cpu_s": num_tokens / statistics.median(seconds[bare] for seconds in turns),
        "labelling_tokens_per_cpu_s": num_tokens / statistics.median(seconds[label] for seconds in turns),
        "labelling_fraction_of_bare": statistics.median(seconds[bare] / seconds[label] for seconds in turns),
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


def benchmark(config: Config, *, rows: int = 48, repeats: int = 3) -> dict[str, Any]:
    """Measure labelling and memory.

    Args:
        rows: responses that are labelled.
        repeats: turns of the arms, less one of 2 repeats + 1.
    """
    config = replace(config, pair=replace(config.pair, num_threads=1))
    with tempfile.TemporaryDirectory() as name:
        config = replace(config, data=replace(config.data, dir=str(Path(name) / "here"), num_train=rows))
        memory = {f"peak_memory_{times}x_mib": peak_memory(config, times, Path(name)) for times in (1, 4, 16)}
        worker = Worker(Job(pair=config.pair, data=config.data, stage="together"))
        result: dict[str, Any] = (
            labelling(worker, ShardSpec("train", 0, tuple(load_prompts(config.data, "train"))), repeats) | memory
        )
    result |= {
        "peak_memory_16x_over_1x": memory["peak_memory_16x_mib"] / memory["peak_memory_1x_mib"],
        "rows": rows,
        "target": config.pair.target.path,
        **measured_where(),
    }
    for key, value in result.items():
        print(f"  {key:<30} {value:,.3f}" if isinstance(value, float) else f"  {key:<30} {value}")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    run({"labelling": benchmark}, default="labelling")
