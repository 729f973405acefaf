"""The data stage against the released SpecDec++ program, command against command.

    python -m benchmarks.data_gen --config benchmarks/alpaca.yaml --pair.sampling.temperature 1 --data.template llama2 \
        --data.prompts PROMPTS.jsonl [--official SCRIPT] [--rows '[1, 200]'] [--more_rows 4096] [--repeats 3]

official   `SCRIPT ROWS FOLDER`: the program's five commands (gen_dataset, gen_assistant, gen_log_p of the draft and of
           the target,
           gen_acceptance) on its first ROWS prompts, with FOLDER/all.json as the last one's output. The program is no
           part of this project; whoever sets it up names it the device and the two models, and saves the lines of
           PROMPTS.jsonl as its data set, in their order.
ours       `python -m data_gen` on the first ROWS lines of PROMPTS.jsonl, with both feature sets, which the program
           leaves to training

Both arms have one thread, and whole processes are timed, start-up included: by the clock, and by their CPU time, which
other load on the machine changes less. The arms take turns; every figure is a median over the turns, and so is every
ratio of ours to the program's. Prompts and their ids are compared between the arms; tokens are those that an arm
generated. At `more_rows` the program's seconds are extrapolated from its least and most rows, and called so. The last
line is one JSON document.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.where import measured_where
from configs.command import run
from configs.schema import Config
from data_gen.store.rows import read_rows
from evaluation.turns import in_turns
from store.shards import list_shards

_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": None}
"""How the program samples."""


class Run(NamedTuple):
    """Seconds and bytes of one arm."""

    wall_s: float
    cpu_s: float
    rows: int
    tokens: int
    bytes: int
    prompts: Mapping[str, list[int]]
    """Each prompt, and its ids."""

    def figures(self) -> dict[str, float]:
        """Every figure that is reported of a run."""
        return {
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "responses_per_s": self.rows / self.wall_s,
            "responses_per_cpu_s": self.rows / self.cpu_s,
            "tokens_per_s": self.tokens / self.wall_s,
            "tokens_per_cpu_s": self.tokens / self.cpu_s,
            "tokens": self.tokens,
            "bytes_per_token": self.bytes / self.tokens,
        }


def timed_run(command: Sequence[str]) -> tuple[float, float]:
    """(wall, CPU) seconds of a process and its children, on one thread."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def official(script: str, num_rows: int, folder: Path) -> Run:
    """Time the official program's five commands."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    seconds = timed_run([script, str(num_rows), str(folder)])
    content = (folder / "all.json").read_bytes()
    items = json.loads(content)
    tokens = sum(len(json.loads(item["tokens"])) for item in items)
    return Run(
        *seconds, len(items), tokens, len(content), {item["prompt"]: json.loads(item["prefix"]) for item in items}
    )


def ours(config: Config, num_rows: int, folder: Path) -> Run:
    """Time `python -m data_gen`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lines = Path(str(config.data.prompts)).read_text().splitlines()[:num_rows]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    places: dict[str, Any] = {"dir": str(folder / "data"), "prompts": str(folder / "prompts.jsonl")}
    sizes: dict[str, Any] = {
        "num_train": num_rows,
        "num_dev": 0,
        "num_test": 0,
        "split_weights": (1, 0, 0),
        "split_ids": None,
    }
    data = replace(config.data, **places, **sizes)
    (folder / "config.yaml").write_text(json.dumps(asdict(replace(config, data=data))))  # JSON is YAML
    seconds = timed_run([sys.executable, "-m", "data_gen", "--config", str(folder / "config.yaml")])
    paths = list_shards(data.dir, "train")
    rows = [row for path in paths for row in read_rows(path, ["prompt", "prompt_ids", "response_ids"]).to_pylist()]
    tokens, num_bytes = sum(len(row["response_ids"]) for row in rows), sum(path.stat().st_size for path in paths)
    return Run(*seconds, len(rows), tokens, num_bytes, {row["prompt"]: row["prompt_ids"] for row in rows})


def compare_programs(
    config: Config, script: str | None, sizes: Sequence[int], *, repeats: int, folder: Path
) -> dict[str, Any]:
    """The figures of both programs at every number of rows, and their ratios."""
    arms: dict[str, Callable[[int], Run]] = {"ours": lambda size: ours(config, size, folder / "ours")}
    if script is not None:
        arms = {"official": lambda size: official(script, size, folder / "official")} | arms
    runs: dict[str, dict[int, list[Run]]] = {arm: {size: [] for size in sizes} for arm in arms}
    for turn in range(repeats):
        for size, order in in_turns(arms, sizes, first=turn):
            for arm in order:
                run = arms[arm](size)
                runs[arm][size].append(run)
                seconds = f"{run.wall_s:7.1f} s  CPU {run.cpu_s:7.1f} s"
                print(f"  turn {turn + 1}: {arm:<8} {size:>5} rows  {seconds}  {run.tokens} tokens", flush=True)
            _refuse_other_prompts(*(runs[arm][size][-1].prompts for arm in arms))
    result: dict[str, Any] = {
        arm: {size: _medians([run.figures() for run in runs[arm][size]]) for size in sizes} for arm in arms
    }
    if script is not None:
        result["ratio"] = {
            size: _medians(list(map(_ratios, runs["official"][size], runs["ours"][size]))) for size in sizes
        }
    return result


def _refuse_other_sampling(config: Config) -> None:
    given = asdict(config.pair.sampling)
    if given != _SAMPLING or config.data.template != "llama2":
        raise ValueError(
            f"the program samples with {_SAMPLING} and the template llama2, not {given} and {config.data.template}; "
            "set these"
        )


def _ratios(theirs: Run, our: Run) -> dict[str, float]:
    """The ratios of our figures to the official program's."""
    return {key: value / theirs.figures()[key] for key, value in our.figures().items()}


def _medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in figures) for key in figures[0]}


def _refuse_other_prompts(first: Mapping[str, list[int]], *others: Mapping[str, list[int]]) -> None:
    for other in others:
        if differing := [prompt for prompt in {**first, **other} if first.get(prompt) != other.get(prompt)]:
            raise ValueError(
                f"the arms differ in {len(differing)} prompts or their ids, first {differing[0][:80]!r}; give both "
                "the same lines"
            )


def extrapolated(result: dict[str, Any], sizes: Sequence[int], more: Run) -> dict[str, Any]:
    """The program's seconds at more rows, on a line through its least and most."""
    if "official" not in result:
        return {}
    least, most = (result["official"][size] for size in (sizes[0], sizes[-1]))
    tokens, further = most["tokens"] * more.rows / sizes[-1], (more.rows - sizes[-1]) / (sizes[-1] - sizes[0])
    seconds = {clock: most[clock] + (most[clock] - least[clock]) * further for clock in ("wall_s", "cpu_s")}
    official = Run(
        **seconds, rows=more.rows, tokens=round(tokens), bytes=round(tokens * most["bytes_per_token"]), prompts={}
    )
    return {
        "official_extrapolated": {more.rows: official.figures()},
        "ratio_extrapolated": {more.rows: _ratios(official, more)},
    }


def data_gen(
    config: Config,
    *,
    official: str | None = None,
    rows: tuple[int, ...] = (1, 200),
    more_rows: int | None = None,
    repeats: int = 3,
) -> dict[str, Any]:
    """Measure the data stage against the program.

    Args:
        official: script that runs the program; null: ours alone.
        rows: numbers of prompts, both arms with each.
        more_rows: a number of prompts for ours alone, once.
        repeats: turns of the arms.
    """
    _refuse_other_sampling(config)
    config = replace(config, pair=replace(config.pair, num_threads=1, micro=None))
    with tempfile.TemporaryDirectory() as name:
        result = compare_programs(config, official, rows, repeats=repeats, folder=Path(name))
        if more_rows is not None:
            larger = ours(config, more_rows, Path(name) / "ours")
            result["ours"] |= {more_rows: larger.figures()}
            result |= extrapolated(result, rows, larger)
    result |= {
        "repeats": repeats,
        "target": config.pair.target.path,
        "batch_size": config.data.batch_size,
        **measured_where(),
    }
    for arm in (key for key, value in result.items() if isinstance(value, dict)):
        for size, figures in result[arm].items():
            print(f"  {arm:<22} {size:>5} rows  " + "  ".join(f"{key} {value:,.3g}" for key, value in figures.items()))
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    run({"data_gen": data_gen}, default="data_gen")
