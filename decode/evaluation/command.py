"""python -m decode evaluate: every policy and every threshold from one trace, chosen on dev, reported on test."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from rich.table import Table
from tqdm import tqdm

from configs.schema import Config
from data_gen.store.shards import write_atomic
from decode.console import wide_console
from decode.costs.command import costs_for
from decode.costs.model import CostModel
from decode.evaluation.decoded import NAMES as HIERARCHY_NAMES
from decode.evaluation.decoded import decode_hierarchies
from decode.evaluation.grids import Grid, both_grid, bounds, grids_of, load_heads
from decode.evaluation.page import ReportArm, ReportHierarchy, report_hierarchies, write_report
from decode.evaluation.plots import Plot, draft_lengths, entropies, pareto, reliability, speed_up_bars, thresholds
from decode.evaluation.results import Arm, Result, replay_arms, results_of, throughput
from decode.hierarchies.trio import check_micro
from decode.policies.registry import POLICIES
from decode.traces.command import datasets_of, load_trace, record
from decode.traces.replay import replay_settings
from decode.traces.trace import Trace
from decode.tuning.rule import auto_for
from heads.model.head import AcceptanceHead

REPORT_RATIOS = (1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 40.0)
NAMES = {
    "target_alone": "target alone",
    **{name: registered.label for name, registered in POLICIES.items() if name != "head"},
    "head_fed": "best head, fed-time",
    "head_drawn": "best head, drawn-time",
    "head_both": "both heads",
    "auto_fed": "auto, fed-time head",
    "auto_fed_online": "auto online, fed-time",
    "auto_drawn": "auto, drawn-time head",
    "auto_drawn_online": "auto online, drawn-time",
    **HIERARCHY_NAMES,
    "perfect_fed": "perfect head, fed-time",
    "perfect_drawn": "perfect head",
    "oracle": "oracle",
}


def evaluate(config: Config) -> None:
    """Replay every policy and threshold on the trace (recorded first, if need be); table, CSV, Parquet, report."""
    check_micro(config.pair, is_needed=config.decode.hierarchies)
    directory = Path(config.decode.dir)
    record(config)
    cost = costs_for(config)
    costs = [cost, *(cost.with_ratio(ratio) for ratio in config.decode.ratios)]
    frames, plots = [], []
    pages: dict[str, list[ReportArm | ReportHierarchy]] = {}
    for dataset in datasets_of(config):
        replayed = replay_dataset(config, dataset, cost)
        arms = replayed.arms
        traces = replayed.dev, replayed.test
        decoded = decode_hierarchies(config, dataset, traces, costs) if config.decode.hierarchies else None
        for each in costs:
            results = results_of([*arms, *replayed.auto_arms(each)], each)
            results = ordered([*results, *(decoded.results(each, results, arms) if decoded else [])])
            wide_console().print(table_of(results, each, dataset, num_prompts=arms[0].test.counts.num_emitted.shape[-1]))
            frame = frame_of(results, each, dataset)
            if decoded:
                wide_console().print(decoded.table(each))
                frame = decoded.annotated(frame, each)
            frames.append(frame)
            plots.append(speed_up_bars(results, each, NAMES))
        plots += replayed.plots(cost)
        pages[dataset] = [*replayed.report_arms(cost), *(report_hierarchies(decoded) if decoded else [])]
        write_counts(directory / f"counts-{dataset}.parquet", arms)
    whole = pd.concat(frames)
    whole.to_csv(directory / "results.csv", index=False)
    write_plots(directory / "plots", plots)
    write_report(directory / "report.html", pages, names=NAMES, about=_about(config, cost), ratio=max(1.5, cost.ratio), plots=plots)
    written = [
        str(directory / "report.html"),
        str(directory / "plots"),
        str(directory / "results.csv"),
        *(str(directory / f"counts-{dataset}.parquet") for dataset in datasets_of(config)),
    ]
    print("\n".join(["wrote", *(f"  {path}" for path in written)]))
    print(json.dumps({"costs": asdict(cost), "results": json.loads(whole.to_json(orient="records")), "written": written}))


@dataclass(frozen=True)
class DatasetReplay:
    """One dataset's traces, and all arms that do not depend on costs."""

    dev: Trace
    test: Trace
    arms: list[Arm]
    best: dict[str, AcceptanceHead]
    """The best head of each timing on dev."""

    def auto_arms(self, cost: CostModel) -> list[Arm]:
        """The rule of law 4.11 for these costs, with the best head of each timing: fixed point on dev, and learning online."""
        arms = []
        for timing, head in self.best.items():
            rules = {
                f"auto_{timing}": auto_for(head, self.dev, cost),
                f"auto_{timing}_online": auto_for(head, self.dev, cost, is_online=True),
            }
            arms += [
                Arm(Grid(family, family, rule, ({},)), replay_settings(self.dev, rule), replay_settings(self.test, rule))
                for family, rule in rules.items()
            ]
        return arms

    def report_arms(self, cost: CostModel) -> list[ReportArm]:
        """Every arm for the page, with the rule solved at several ratios."""
        rules = [
            ReportArm(arm, ratio)
            for ratio in REPORT_RATIOS
            for arm in self.auto_arms(cost.with_ratio(ratio))
            if "online" not in arm.grid.family
        ]
        return [*map(ReportArm, self.arms), *rules]

    def plots(self, cost: CostModel) -> list[Plot]:
        """All plots but the bars."""
        plots = [pareto(self.arms, NAMES), thresholds(self.arms, cost, NAMES), draft_lengths(self.arms, cost, NAMES)]
        if self.best:
            plots.append(reliability(self.test, {f"best {timing}-time head": head for timing, head in self.best.items()}))
        return [*plots, entropies(self.test)]


def replay_dataset(config: Config, dataset: str, cost: CostModel) -> DatasetReplay:
    """All arms of one dataset, bounds last; the two-head grid is built from the best head of each timing."""
    heads = load_heads(config)
    dev, test = load_trace(config, dataset, "dev"), load_trace(config, dataset, "test")
    grids, ends = grids_of(config, heads), list(bounds())
    if not config.decode.perfect_head:
        ends = ends[-1:]
    with tqdm(total=sum(len(grid.settings) for grid in [*grids, *ends]), desc=f"replay: {dataset}", unit="setting") as bar:
        arms = replay_arms(grids, dev, test, bar.update)
        best = {}
        for timing in ("fed", "drawn"):
            members = [arm for arm in arms if arm.grid.family == f"head_{timing}"]
            if members:
                best[timing] = max(members, key=lambda arm: throughput(arm.dev, cost).max()).grid.name.removeprefix("head:")
        if len(best) == 2:
            both = both_grid("+".join(best.values()), heads[best["fed"]], heads[best["drawn"]])
            arms += replay_arms([both], dev, test, lambda count: None)
        arms += replay_arms(ends, dev, test, bar.update)
    return DatasetReplay(dev, test, arms, {timing: heads[name] for timing, name in best.items()})


def write_plots(directory: Path, plots: Sequence[Plot]) -> None:
    """Every plot as an SVG file."""
    for plot in plots:
        write_atomic(directory / f"{plot.name}.svg", plot.svg.encode())


def _about(config: Config, cost: CostModel) -> str:
    sampling = ", ".join(f"{key} {value}" for key, value in vars(config.pair.sampling).items() if value is not None)
    names = " / ".join(Path(source.path).name for source in (config.pair.target, config.pair.draft))
    measured = f"t_draft {cost.t_draft_s * 1e3:.2f} ms, t_target {cost.t_target_s[0] * 1e3:.2f} ms ({cost.origin})"
    limits = f"responses up to {config.decode.max_new_tokens} tokens, drafts up to {config.decode.max_draft_length}"
    return f"{names}; {sampling}; {limits}; {measured}"


def ordered(results: Sequence[Result]) -> list[Result]:
    """Baselines, training-free policies, heads, the rule, bounds."""
    places = {family: place for place, family in enumerate(NAMES)}
    return sorted(results, key=lambda result: places.get(result.family, len(places)))


def table_of(results: Sequence[Result], cost: CostModel, dataset: str, *, num_prompts: int) -> Table:
    """The table of one dataset at one cost."""
    table = Table(
        title=f"{dataset}: {num_prompts} test prompts, settings chosen on dev; t_target/t_draft = {cost.ratio:.2f} ({cost.origin})",
        caption="gain: throughput over the best fixed length's, with 95 % paired bootstrap interval over prompts",
    )
    columns = ("policy", "setting", "discard rate", "verification rate", "acceptance length", "tokens/s", "speed-up", "gain", "% of oracle")
    for column in columns:
        table.add_column(column, justify="left" if column in ("policy", "setting") else "right", overflow="fold")
    alone = 1 / cost.t_target_s[0]
    table.add_row("target alone", "-", "0.000", "1.000", "1.00", f"{alone:.1f}", "1.00", "", f"{100 * alone / _oracle(results):.1f}")
    for result in results:
        table.add_row(
            NAMES.get(result.family, result.family),
            result.label,
            f"{result.discard_rate:.3f}",
            f"{result.verification_rate:.3f}",
            f"{result.acceptance_length:.2f}",
            f"{result.tokens_per_s:.1f}",
            f"{result.speed_up:.2f}",
            "" if result.family == "fixed_length" else f"{result.gain:+.1%} ({result.gain_low:+.1%}, {result.gain_high:+.1%})",
            f"{result.percent_of_oracle:.1f}",
        )
    return table


def frame_of(results: Sequence[Result], cost: CostModel, dataset: str) -> pd.DataFrame:
    """The same as rows of numbers."""
    rows = [{"dataset": dataset, "ratio": cost.ratio, "costs": cost.origin, **asdict(result)} for result in results]
    for row in rows:
        row["setting"] = json.dumps(row["setting"])
    return pd.DataFrame(rows)


def write_counts(path: Path, arms: Sequence[Arm]) -> None:
    """Totals of every setting of every grid on both splits."""
    rows = []
    for arm in arms:
        for split, replayed in (("dev", arm.dev), ("test", arm.test)):
            for setting, described in enumerate(arm.grid.settings):
                totals = {name: int(values[setting].sum()) for name, values in vars(replayed.counts).items() if hasattr(values, "sum")}
                lengths = replayed.lengths[setting].sum(0).tolist()
                rows.append(
                    {
                        "family": arm.grid.family,
                        "name": arm.grid.name,
                        "setting": json.dumps(dict(described), default=float),
                        "split": split,
                    }
                    | totals
                    | {"rounds_by_length": lengths}
                )
    pd.DataFrame(rows).to_parquet(path, index=False)


def _oracle(results: Sequence[Result]) -> float:
    return next(result.tokens_per_s for result in results if result.family == "oracle")
