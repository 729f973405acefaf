"""SVIP (arXiv 2411.18462), Tables 3 and 4, clocked: stopping on drafts that are not plain chains, GliDe with CaPE and
EAGLE-2.

    Table 3   a chain, and the same with CaPE's siblings; published with 4 tokens
    Table 4   EAGLE-2's tree; published with six levels, 10 candidates after a node and 59 nodes in all, and with stops
              that are asked after every second level

Each as published, at the fixed length that is fastest on dev, and with every stop at the setting that is fastest on dev
(`evaluation.papers.drafts`). Speed-ups over the target alone, by dataset, or by category of the prompts where there is
one dataset: all configurations in turns on every test prompt, medians of several repeats. Generations are stored, so
that an interrupted run resumes.

The tables are of the pair's own draft: a GliDe draft makes Table 3, an EAGLE draft Table 4, and a draft that is a
language model makes both, which are then not of the paper's systems. The paper gives the threshold .5 for GliDe and
none for EAGLE-2; its temperatures are 0 (Table 3) and 1 (Table 4), here the config's decides.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from data_gen.prompts.splits import Split
from decode.drafters.factory import PairModels
from decode.drafters.trees.shapes import Cape
from decode.experiment import Experiment
from evaluation.gain import Spent
from evaluation.hierarchies.decoded import StoredLoop
from evaluation.papers.drafts import (
    BEST,
    PUBLISHED,
    Draft,
    Line,
    chosen,
    configurations_of,
    eagle_2,
    lengths_of,
    lines_of,
    play,
    stop_verdict,
    stops_of,
    target_alone,
)
from evaluation.table import Table
from lm.features.eagle import Eagle
from lm.features.glide import Glide

CHAIN = Draft("chain", published=4)
CAPE = Draft("CaPE", Cape(), published=4)


def tree_tables(experiment: Experiment, *, specs: Sequence[str], repeats: int, tree: tuple[int, int]) -> list[Table]:
    """The part of Tables 3 and 4 that this draft makes.

    Raises:
        ValueError: no test prompts, no dev prompts; a draft or a target that cannot hold a tree.
    """
    stops, drafting = stops_of(experiment, specs), experiment.pair.drafting
    drafts = {"3": [CHAIN, CAPE]} if not isinstance(drafting, Eagle) else {}
    drafts |= {"4": [eagle_2(*tree)]} if not isinstance(drafting, Glide) else {}
    lengths = lengths_of(experiment, [draft for of_table in drafts.values() for draft in of_table])
    splits: tuple[Split, ...] = ("dev", "test")
    encoded = {split: {name: experiment.encoded(name, split) for name in experiment.datasets} for split in splits}
    if not any(encoded["test"].values()):
        raise ValueError("there are no test prompts to decode; raise decode.num_test")
    dev, test = ({name: [ids for _, ids in of_set] for name, of_set in encoded[split].items()} for split in splits)
    has_one, models = len(experiment.datasets) == 1, PairModels(lambda: experiment.pair, holds_trees=True)
    columns = [
        (prompt.category if has_one else "") or dataset
        for dataset, prompts in encoded["test"].items()
        for prompt, _ in prompts
    ]
    tables = []
    for number, of_table in drafts.items():
        folder = f"svip-table-{number}/{Path(experiment.models.draft.path).name}"
        loops = {name: StoredLoop(experiment, name, models, folder=folder) for name in experiment.datasets}
        finalists = [
            chosen(draft, configurations_of(draft, stops, models, lengths=lengths), partial(play, loops, dev))
            for draft in of_table
        ]
        members = [target_alone(models), *(one for finalist in finalists for one in finalist.all)]
        runs = play(loops, test, members, repeats=repeats)
        lines = [line for finalist in finalists for line in lines_of(finalist, runs)]
        title = (
            f"SVIP Table {number}: speed-up at T = {experiment.sampling.temperature:g}, settings chosen on "
            f"{sum(map(len, dev.values()))} dev prompts, clocked on {len(columns)} test prompts, medians of "
            f"{repeats} turns"
        )
        tables.append(Table(title, line_rows(lines, runs[0].measured, columns), stop_verdict(lines)))
    return tables


def line_rows(lines: Sequence[Line], alone: Spent, columns: Sequence[str]) -> list[dict[str, str]]:
    """Speed-ups over the target alone by column of the prompts, over all of them, and gains."""
    labels = np.array(columns)
    parts = {name: labels == name for name in sorted(set(columns))} | {"Avg.": np.full(len(labels), True)}

    def speed(spent: Spent, part: np.ndarray) -> float:
        return float(Spent(spent.tokens[part], spent.seconds[part]).tokens_per_s)

    return [
        {
            "Methods": line.method,
            **{name: f"{speed(line.run.measured, part) / speed(alone, part):.2f}" for name, part in parts.items()},
            "setting": line.run.configuration.setting,
            **{f"over {rival}": line.gain(rival) for rival in (PUBLISHED, BEST)},
        }
        for line in lines
    ]
