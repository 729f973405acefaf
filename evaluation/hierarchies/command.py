"""python -m evaluation hierarchy: does a third model pay? HSDDW's Tables 2 and 4, and Chen's variant, on this trio.

Every competitor runs in the real loop, prompt by prompt in turns. Where its length is open, the length is chosen on
dev, by the modelled throughput at the fitted times. Beside the measured speed-ups stand those that the same counts give
at other times, and, from dev, at which ratios of times the best hierarchy beats the best plain speculation. Generations
are stored (`evaluation.hierarchies.generations`), so a killed run resumes; times are those of the run that decoded.

Some 38 drafters play each dev prompt and 11 each test prompt: about 0.2 s per generation on the embedded trio, 0.35 s
on that of benchmarks/alpaca.yaml, on one quiet core. Four minutes each:

    python -m evaluation hierarchy --config configs/tiny.yaml --decode.num_dev 16
    python -m evaluation hierarchy --config benchmarks/alpaca.yaml --decode.num_dev 8 --decode.num_test 36
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json import dumps as to_json
from json import loads
from pathlib import Path
from typing import Any

from configs.schema import Config
from decode.drafters.factory import PairModels
from decode.experiment import BETWEEN, Experiment
from evaluation.costs.machine import shares_of
from evaluation.costs.stops import policies_by_kind
from evaluation.hierarchies.built import Competitor
from evaluation.hierarchies.configurations import competitors_of, with_heads
from evaluation.hierarchies.runs import Candidate, ResumableLoop, at_settings, best_on_dev, resumable_loop, trio_times
from evaluation.hierarchies.tables import (
    ablation_sheet,
    arms_frame,
    arms_sheet,
    gain_sheet,
    third_level_frame,
    third_level_plot,
    third_level_verdict,
)
from evaluation.hierarchies.times import at_ratios
from evaluation.table import announce, printing, say
from store.shards import write_atomic

_FILES = ("arms.csv", "gain.csv", "gain.svg")


def hierarchy(
    config: Config,
    *,
    level_heads: tuple[str, str] | None = None,
    max_rejection_prob: float = 0.5,
    ratios: tuple[float, float] = (0.02, 0.2),
    json: bool = False,
) -> None:
    """HSDDW's Tables 2 and 4 for this trio, Chen's variant beside them, and where a third level pays.

    Args:
        config: pair.micro is needed; decode.num_dev and num_test say how many prompts.
        level_heads: exported heads for two further competitors: one trained on (micro, draft), one on (draft, target).
        max_rejection_prob: threshold of both heads, on their calibrated probabilities.
        ratios: t_micro and t_draft in target forwards, for a column at other times than this machine's.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    experiment = Experiment(config, needs_micro=True)
    trio = PairModels(lambda: experiment.pair, with_hidden=level_heads is not None)
    competitors, heads = competitors_of(trio), []
    if level_heads is not None:
        heads = [
            experiment.load_head(path, drafting=low, verifying=high)
            for path, (low, high) in zip(level_heads, BETWEEN, strict=True)
        ]
        competitors += with_heads(trio, heads, level_heads, max_rejection_prob=max_rejection_prob)
    # at other times than this machine's a stop costs what it does in a replay
    shares = shares_of(experiment, policies_by_kind(heads), {}).of
    loops = {dataset: resumable_loop(experiment, dataset, trio) for dataset in experiment.datasets}
    documents = {}
    for dataset, loop in loops.items():
        prompts = {"dev": experiment.prompt_ids(dataset, "dev"), "test": experiment.prompt_ids(dataset, "test")}
        dev, runs = play(loop, competitors, prompts)
        with printing(aside=json):
            documents[dataset] = report_dataset(runs, dev, ratios=ratios, shares=shares, directory=loop.directory)
    with printing(aside=json):
        written = announce(loop.directory / name for loop in loops.values() for name in _FILES)
        for dataset, document in documents.items():
            say(f"\n{dataset}. {document['verdict']}" if len(documents) > 1 else f"\n{document['verdict']}")
    if json:
        print(to_json({"datasets": documents, "written": written}))


def play(
    loop: ResumableLoop, competitors: Sequence[Competitor], prompts: Mapping[str, Sequence[list[int]]]
) -> tuple[list[Candidate], list[Candidate]]:
    """(every setting of every competitor on dev, each competitor at its setting on test)."""
    if not prompts["test"]:
        raise ValueError("there are no test prompts to compare hierarchies on; raise decode.num_test")
    dev = loop.play(competitors, prompts["dev"]) if prompts["dev"] else []
    times = trio_times(dev) if dev else None
    best = best_on_dev(dev, lambda run: run.speedup(times)) if times else {}
    return dev, loop.play(at_settings(competitors, best), prompts["test"])


def report_dataset(
    runs: Sequence[Candidate],
    dev: Sequence[Candidate],
    *,
    ratios: tuple[float, float],
    shares: Mapping[str, float],
    directory: Path,
) -> dict[str, Any]:
    """Print the tables of one dataset and write them; the same as JSON."""
    times, given = trio_times([*dev, *runs]), at_ratios(*ratios, shares)
    frame, gain = arms_frame(runs, times, given=given), third_level_frame(dev or runs, times, shares)
    frame.to_csv(directory / "arms.csv", index=False)
    gain.to_csv(directory / "gain.csv", index=False)
    write_atomic(directory / "gain.svg", third_level_plot(gain, directory.name).svg.encode())
    title = (
        f"{directory.name}: {len(runs[0].decoded)} test prompts, settings chosen on "
        f"{len(dev[0].decoded) if dev else 0} dev prompts"
    )
    sheets = [ablation_sheet(frame), arms_sheet(frame, times, given=given, title=title)]
    for sheet in (*sheets, gain_sheet(gain, split="dev" if dev else "test")):
        sheet.print()
    conclusion = third_level_verdict(runs, dev, gain, times=times)
    return {"times": asdict(times), "arms": loads(frame.to_json(orient="records")), "verdict": conclusion}
