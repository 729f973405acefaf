"""acceptance-heads hierarchy: does a third model pay? HSDDW's ablation and Table 4, and Chen's variant.

Every competitor is decoded in the real loop, in turns on each prompt. Dev chooses open lengths, by the throughput
predicted at the fitted times. Beside the measured speed-ups are those that the same counts give at other times, and,
from dev, the ratios of times at which the best hierarchy beats the best plain speculation.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from configs.load import accepts_yaml
from configs.schema import Config
from decode.drafters.factory import PairModels
from decode.experiment import BETWEEN, Experiment
from evaluation.competitor import Competitor
from evaluation.contest import best_setting
from evaluation.costs.stops import policies_by_kind, shares_of
from evaluation.table import announce, printing, say
from papers.hierarchies import tables
from papers.hierarchies.configurations import hierarchies_of
from papers.hierarchies.decoded import Decoded, StoredLoop
from papers.hierarchies.times import at_ratios, fit_times
from store.shards import write_atomic

_FILES = ("arms.csv", "gain.csv", "gain.svg")
_GIVEN = (0.02, 0.2)
"""t_micro and t_draft in target forwards, for a column at other times than this machine's."""


@accepts_yaml
def hierarchy(
    config: Config,
    *,
    level_heads: tuple[str, str] | None = None,
    max_rejection_prob: float = 0.5,
    json: bool = False,
) -> None:
    """Run `acceptance-heads hierarchy`; `configs.measuring` documents its flags."""
    experiment = Experiment(config, needs_micro=True)
    heads = {
        path: experiment.load_head(path, drafting=low, verifying=high)
        for path, (low, high) in zip(level_heads or (), BETWEEN, strict=False)
    }
    trio = PairModels(lambda: experiment.pair)
    competitors = hierarchies_of(experiment, trio, heads, max_rejection_prob=max_rejection_prob)
    # at other times than this machine's a stop costs what it does in a replay
    shares = shares_of(experiment, policies_by_kind(list(heads.values())), {}).of
    loops = {dataset: StoredLoop(experiment, dataset) for dataset in experiment.datasets}
    documents = {}
    with printing(json) as publish:
        for dataset, loop in loops.items():
            dev, test = play(loop, competitors)
            documents[dataset] = publish_tables(dev, test, shares, loop.directory)
        written = announce(loop.directory / name for loop in loops.values() for name in _FILES)
        for dataset, document in documents.items():
            say(f"\n{dataset}. {document['verdict']}" if len(documents) > 1 else f"\n{document['verdict']}")
        publish({"datasets": documents, "written": written})


def play(loop: StoredLoop, competitors: Sequence[Competitor]) -> tuple[list[Decoded], list[Decoded]]:
    """(every setting on dev, each competitor at its fastest one there on test)."""
    best_settings = [entry.at(0) for entry in competitors]
    if dev := loop.play(competitors, "dev"):
        times, _ = fit_times(dev)
        best_settings = [member.competitor.at(best_setting(member.played, times)[0]) for member in dev]
    return dev, loop.play(best_settings, "test")


def publish_tables(
    dev: Sequence[Decoded], test: Sequence[Decoded], shares: Mapping[str, float], directory: Path
) -> dict[str, object]:
    """Print the tables of one dataset and write them; the same as JSON."""
    times, r2 = fit_times([*dev, *test])
    given = at_ratios(*_GIVEN, shares)
    rows = tables.hierarchy_rows(test, times, given)
    gain = tables.third_level_frame(dev or test, times, shares)
    for name, frame in (("arms", pd.DataFrame(rows)), ("gain", gain)):
        write_atomic(directory / f"{name}.csv", frame.to_csv(index=False).encode())
    write_atomic(directory / "gain.svg", tables.third_level_plot(gain, directory.name).svg.encode())
    num_test = len(test[0].played.prompt_of_row)
    num_dev = len(dev[0].played.prompt_of_row) if dev else 0
    title = f"{directory.name}: {num_test} test prompts, settings chosen on {num_dev} dev prompts"
    tables.table_4(rows, times, r2, given=given, title=title).print()
    tables.gain_table(gain, split="dev" if dev else "test").print()
    verdict = tables.third_level_verdict(test, dev, gain, times=times, r2=r2)
    fitted = {"t_micro_s": times.t_micro_s, "t_draft_s": times.t_draft_s, "t_target_s": times.alone_s}
    return {"times": fitted | {"t_stop_s": times.t_stop_s, "r2": r2}, "arms": rows, "verdict": verdict}
