"""python -m evaluation bench: wall clock of every policy family beside transformers' assisted generation, arms taking
turns on every prompt.

    --batch     fixed lengths and policies in continuous batches, and the curves of law 4.13
                (`evaluation.bench.batch_sizes`)
    policies    each family at the setting that is fastest on dev, the best fixed length, the target alone, and
                transformers' schedules
                (`evaluation.bench.race`), greedy, at temperature 1, and at 0.7 with top-p 0.9; with `--ratios` on
                models that are made slow by layers that change nothing (`evaluation.bench.speeds`). Finished cells stay
                in DIR/bench.jsonl
    lengths     the loop beside assisted generation at equal fixed lengths; with `decode.compile` also compiled
                (`evaluation.bench.lengths`)
    overheads   what the loop spends outside forwards (`evaluation.bench.overheads`); `evaluation costs` prints what
                stops add

With `decode.hierarchies` also three models beside two (`evaluation.bench.lengths`).
"""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from json import dumps as to_json
from typing import Any, Literal

import torch

from configs.schema import Config
from data_gen.store.manifest import git_commit
from decode.experiment import Experiment
from decode.policies import FixedLength, Policy
from evaluation.batches.curves import keep_curves
from evaluation.bench.abroad import abroad_sheets
from evaluation.bench.batch_sizes import measure_sizes, size_sheet, size_verdict
from evaluation.bench.lengths import (
    hierarchy_rows,
    hierarchy_sheet,
    hierarchy_verdict,
    length_rows,
    length_sheet,
    length_verdict,
)
from evaluation.bench.overheads import overhead_verdict, overheads_of
from evaluation.bench.plots import race_plot
from evaluation.bench.race import SAMPLINGS, Race, RaceTerms
from evaluation.bench.standings import records_of, standing_sheet, standings_of, summary_sheet, verdict_of
from evaluation.contest.in_batches import sizes_of
from evaluation.costs.measure import Loop
from evaluation.flag_types import Part, RaceRules, Sizes
from evaluation.sheet import announce, printing, say, wide_console
from store.shards import write_atomic

_WIDTH = 240
_PLAIN = {name: SAMPLINGS[name] for name in ("greedy", "sampled")}
"""Without warpers, which transformers applies to the draft twice: it would lose for another reason than its loop."""
_VERDICTS = {"lengths": length_verdict, "overheads": overhead_verdict, "hierarchies": hierarchy_verdict}
"""What each kind of rows says in sentences."""


def bench(
    config: Config,
    *,
    parts: tuple[Part, ...] = ("policies",),
    batch: Sizes | None = None,
    ratios: tuple[float, ...] = (),
    t_draft_ms: float = 10.0,
    samplings: tuple[Literal["greedy", "sampled", "nucleus", "own"], ...] = ("greedy", "sampled", "nucleus"),
    policies: tuple[str, ...] = (),
    families: tuple[str, ...] = (),
    constants: tuple[int, ...] = (),
    race: RaceRules = RaceRules(),  # noqa: B008  # frozen
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10),
    threads: tuple[int, ...] = (1, 2),
    num_prompts: int = 16,
    num_tokens: int = 64,
    json: bool = False,
) -> dict[str, Any]:
    """Wall clock, side by side with transformers' assisted generation.

    Args:
        config: names the pair; of policies also its trace, heads, costs, and whether the loop is compiled.
        parts: the measurements to make.
        batch: sizes of continuous batches, in which `lengths` and `policies` are then measured; null: one sequence.
        ratios: for `policies`, the t_target / t_draft to which both models are slowed; empty: the pair as it is.
        t_draft_ms: for `policies` with ratios, milliseconds of a draft step, unless the draft is slower as it is.
        samplings: for `policies`, any of greedy, sampled (temperature 1), nucleus (0.7, top-p 0.9), own (the config's).
        policies: specs that run in place of each family's best, one a fixed length: head:PATH,max_rejection_prob=0.4.
        families: for `policies`, the families that run beside the best fixed length; empty: all.
        constants: for `policies`, lengths of transformers' constant schedule; empty: our best fixed one and half of it.
        race: for `policies`, --race.datasets, .num_fixed, .cycles, .run, .ignore_eos, .assistant (see --help.all).
        lengths: for `lengths`, the fixed draft lengths.
        threads: for `lengths` and `overheads`, numbers of CPU threads to measure with.
        num_prompts: generations per arm.
        num_tokens: tokens per generation; EOS is switched off but by `race.ignore_eos`.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    counts = {"num_prompts": num_prompts, "num_tokens": num_tokens}
    sizes, bare = sizes_of(batch), Bare(config, lengths=lengths, **counts)
    document: dict[str, Any] = {"where": where(config), **counts}
    terms = RaceTerms(num_prompts, num_tokens, t_draft_ms, policies, families, constants, race)
    with printing(aside=json):
        if "policies" in parts and sizes is None:
            document["cells"] = _raced(Race(config, terms), ratios, samplings)
        document |= bare.measured(parts, threads) if sizes is None else bare.in_batches(sizes, policies)
    if json:
        print(to_json(document))
    return document


def _raced(race: Race, ratios: Sequence[float], samplings: Sequence[str]) -> list[dict[str, Any]]:
    """Print each cell as soon as it is there; then the plot."""
    cells = []
    print("bench: every policy and schedule in turns; finished cells are kept", flush=True)
    for cell in race.cells(ratios, samplings):
        cells.append((cell, standings_of(cell)))
        standing_sheet(*cells[-1]).print(_WIDTH)
    if len(cells) > 1:
        summary_sheet(cells).print(_WIDTH)
    if len({cell["dataset"] for cell, _ in cells}) > 1:
        for sheet in abroad_sheets(cells):
            sheet.print(_WIDTH)
    plot, path = race_plot(cells), race.experiment.directory / "plots" / "bench.svg"
    write_atomic(path, plot.svg.encode())
    announce([race.path, path])
    for cell, standings in cells:
        say(f"\n{verdict_of(cell, standings)}")
    return [{**cell, "arms": records_of(cell, standings)} for cell, standings in cells]


class Bare:
    """The loop itself, whatever policy runs in it: on the experiment's pair, two samplings without warpers."""

    def __init__(self, config: Config, *, lengths: Sequence[int], num_prompts: int, num_tokens: int) -> None:
        self._experiment = Experiment(config, needs_micro=config.decode.hierarchies)
        self._lengths, self._num_prompts, self._num_tokens = lengths, num_prompts, num_tokens

    @cached_property
    def _prompts(self) -> list[list[int]]:
        return self._experiment.prompt_ids(next(iter(self._experiment.datasets)), "test", num=self._num_prompts)

    def measured(self, parts: Sequence[Part], threads: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
        """Rows of every part that is asked for, printed as they come, and their tables."""
        rows: dict[str, list[dict[str, Any]]] = {"lengths": [], "overheads": [], "hierarchies": []}
        console = wide_console()
        is_asked = self._experiment.decode.hierarchies or not {"lengths", "overheads"}.isdisjoint(parts)
        for num_threads in threads if is_asked else ():
            torch.set_num_threads(num_threads)
            for kind, row in self._rows(parts):
                rows[kind].append({"threads": num_threads, **row})
                console.print(_line(rows[kind][-1]), soft_wrap=True)
        for kind, sheet in (("lengths", length_sheet), ("hierarchies", hierarchy_sheet)):
            if rows[kind]:
                sheet(rows[kind]).print()
        for kind, verdict in _VERDICTS.items():
            if rows[kind]:
                say(f"\n{verdict(rows[kind])}")
        return {kind: of_kind for kind, of_kind in rows.items() if of_kind}

    def in_batches(self, sizes: Sequence[int], specs: Sequence[str]) -> dict[str, Any]:
        """Rows of every size, and the curves that their rounds give."""
        for name, value in (("num_prompts", self._num_prompts), ("num_tokens", self._num_tokens)):
            if value < 1:
                raise ValueError(f"--{name} is {value}; at least 1 is timed")
        experiment = self._experiment
        policies: dict[str, Policy] = {f"fixed_length:k={k}": FixedLength(k) for k in (0, *self._lengths)} | {
            spec: experiment.policy(spec) for spec in specs
        }
        loop = Loop.of(
            experiment,
            prompts=self._prompts,
            max_draft_length=max([experiment.decode.max_draft_length, *self._lengths]),
            max_new_tokens=self._num_tokens,
            compile=False,
        )
        rows, curves = measure_sizes(loop, policies, sizes)
        size_sheet(rows).print()
        announce([keep_curves(experiment, curves)])
        say(f"\n{size_verdict(rows)} `evaluate --batch` predicts every policy from these curves.")
        return {"batches": rows, "curves": {name: asdict(curve) for name, curve in curves._asdict().items()}}

    def _rows(self, parts: Sequence[Part]) -> Iterator[tuple[str, dict[str, Any]]]:
        pair, prompts, num_tokens, decode = (
            self._experiment.pair,
            self._prompts,
            self._num_tokens,
            self._experiment.decode,
        )
        if "lengths" in parts:
            settings: dict[str, Any] = {
                "lengths": self._lengths,
                "num_tokens": num_tokens,
                "has_compiled": decode.compile is True,
            }
            for row in length_rows(pair, prompts, _PLAIN, **settings):
                yield "lengths", row
        if "overheads" in parts:
            yield "overheads", overheads_of(pair, prompts, _PLAIN, num_tokens=num_tokens)
        if decode.hierarchies:
            for row in hierarchy_rows(pair, prompts, _PLAIN, lengths=self._lengths, num_tokens=num_tokens):
                yield "hierarchies", row


def where(config: Config) -> dict[str, Any]:
    """Models, hardware, versions, commit, date."""
    return {
        "target": config.pair.target.path,
        "draft": config.pair.draft.path,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }


def _line(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in row.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
