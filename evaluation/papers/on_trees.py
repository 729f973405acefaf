"""SVIP (arXiv 2411.18462), Tables 3 and 4, clocked: stopping on drafts that are not plain chains, GliDe with CaPE and
EAGLE-2.

    Table 3   a chain, and the same with CaPE's siblings; published with 4 tokens
    Table 4   EAGLE-2's tree; published with six levels, 10 candidates after a node and 59 nodes in all, and with stops
              that are heeded
              after every second level

Each as published, at the fixed length that is fastest on dev, and with every stop at the setting that is fastest on dev
(`evaluation.papers.gains`). Speed-ups over the target alone, by dataset, or by category of the prompts where there is
one dataset: all arms in turns on every test prompt, medians of several repeats. Generations are kept, so that a killed
run goes on.

The tables are of the pair's own draft: a GliDe draft makes Table 3, an EAGLE draft Table 4, and a draft that is a model
of its own makes both, which are then not of the paper's systems. The paper gives the threshold .5 for GliDe and none
for EAGLE-2; its temperatures are 0 (Table 3) and 1 (Table 4), here the config's decides.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data_gen.prompts.splits import Split
from decode.drafters.factory import PairModels
from decode.drafters.trees.shapes import Cape
from decode.experiment import Experiment
from evaluation.hierarchies.built import Competitor
from evaluation.hierarchies.configurations import NO_DRAFT
from evaluation.hierarchies.runs import Candidate, resumable_loop
from evaluation.papers.drafts import DraftModels, Kind, StopChoices, contest_of, eagle_2, lengths_of, stops_of
from evaluation.papers.gains import by_key, finalists_of, joined, line_rows, lines_of, stop_verdict
from evaluation.table import Table
from lm.features.eagle import Eagle
from lm.features.glide import Glide

CHAIN = Kind("chain", published=4)
CAPE = Kind("CaPE", Cape(), published=4)
Prompts = Mapping[str, Sequence[tuple[str, list[int]]]]
"""dataset -> (column of the table, token ids) of each prompt."""


def tree_tables(experiment: Experiment, *, specs: Sequence[str], repeats: int, tree: tuple[int, int]) -> list[Table]:
    """The part of Tables 3 and 4 that this draft makes.

    Raises:
        ValueError: no test prompts, no dev prompts; a draft or a target that cannot hold a tree.
    """
    stops, drafting = stops_of(experiment, specs), experiment.pair.drafting
    kinds = {"3": [CHAIN, CAPE]} if not isinstance(drafting, Eagle) else {}
    kinds |= {"4": [eagle_2(*tree)]} if not isinstance(drafting, Glide) else {}
    lengths = lengths_of(experiment, [kind for kinds_of_table in kinds.values() for kind in kinds_of_table])
    splits: tuple[Split, ...] = ("dev", "test")
    prompts = {split: prompts_by_column(experiment, split) for split in splits}
    if not any(prompts["test"].values()):
        raise ValueError("there are no test prompts to decode; raise decode.num_test")
    table = TreeTable(experiment, prompts, stops, lengths, repeats)
    return [table.sheet(number, kinds_of_table) for number, kinds_of_table in kinds.items()]


def prompts_by_column(experiment: Experiment, split: Split) -> Prompts:
    """Prompts of every dataset."""
    is_one = len(experiment.datasets) == 1
    return {
        dataset: [
            ((prompt.category if is_one else "") or dataset, ids) for prompt, ids in experiment.encoded(dataset, split)
        ]
        for dataset in experiment.datasets
    }


class TreeTable:
    """The tables of one experiment on trees."""

    def __init__(
        self,
        experiment: Experiment,
        prompts: Mapping[Split, Prompts],
        stops: Sequence[StopChoices],
        lengths: Sequence[int],
        repeats: int,
    ) -> None:
        self._experiment, self._prompts, self._repeats = experiment, prompts, repeats
        self._stops, self._lengths, self._models = stops, lengths, DraftModels(experiment)

    def sheet(self, number: str, kinds: Sequence[Kind]) -> Table:
        """One table: choose on dev, clock on test."""
        contests = [contest_of(kind, self._stops, self._models, lengths=self._lengths) for kind in kinds]
        # one competitor after the other, for the choice is among its own settings: a stop that is added leaves the
        # others as they are
        dev = [
            run
            for contest in contests
            for competitor in contest.competitors
            for run in self._play(number, [competitor], "dev")
        ]
        finalists = [finalists_of(contest, dev) for contest in contests]
        arms = [self._models.alone, *(competitor for finalist in finalists for competitor in finalist.competitors)]
        runs = by_key(self._play(number, arms, "test", repeats=self._repeats))
        lines = [line for finalist in finalists for line in lines_of(finalist, runs)]
        columns = [column for members in self._prompts["test"].values() for column, _ in members]
        num_dev = sum(map(len, self._prompts["dev"].values()))
        title = (
            f"SVIP Table {number}: speed-up at T = {self._experiment.sampling.temperature:g}, settings chosen on "
            f"{num_dev} dev prompts, clocked on {len(columns)} test prompts, medians of {self._repeats} turns"
        )
        return Table(title, line_rows(lines, runs[NO_DRAFT, ""].measured, columns), stop_verdict(lines, finalists))

    def _play(self, number: str, arms: Sequence[Competitor], split: Split, *, repeats: int = 1) -> list[Candidate]:
        """Decode all prompts of a split."""
        experiment = self._experiment
        folder, trio = (
            f"svip-table-{number}/{Path(experiment.models.draft.path).name}",
            PairModels(lambda: experiment.pair),
        )
        return joined(
            [
                resumable_loop(experiment, dataset, trio, folder=folder).play(
                    arms, [ids for _, ids in members], repeats=repeats
                )
                for dataset, members in self._prompts[split].items()
                if members
            ]
        )
