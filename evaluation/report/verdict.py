"""The verdict of an evaluation, made once, shown on the console and on the page: a sentence, and where the oracle's
gain goes.

The sentence names the best head, the best policy that needs no training and the best fixed length, each
chosen on dev, with the gains that the table has. Where the interval does not show that training pays, the sentence says
so. Everything is predicted from counts and times (law 4.9), and is called so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.competitor import head_in
from evaluation.contest.results import Result, lead_of
from evaluation.contest.tables import result_sheet, values_of
from evaluation.contest.travel import Judged
from evaluation.families import (
    AUTO,
    BASELINE,
    BOUND,
    CUSTOM,
    ENGINES,
    ENTROPIES,
    HEADS,
    ORACLE,
    PAPERS,
    PERFECT,
    PROBABILITIES,
    TRAINING_FREE,
    family,
)
from evaluation.figure import Plot
from evaluation.gain import Gain
from evaluation.report.stages import Stage, console_sheet, stage_plot, stage_sheet, stages_of
from evaluation.table import Table
from evaluation.times import Times
from heads.model.head import TIMING_LABELS, AcceptanceHead
from lm.signals import SCALARS

_SCORED = {
    "drawn": "the moment it is drawn",
    "fed": "once the draft has read it, one forward later (as SpecDec++ does)",
    "prefix": "before it is drawn",
    "candidate": "as a candidate of a tree",
}
_SCALARS = {"log_token_prob": "the token's log-probability", "entropy": "the entropy of the draft's distribution"}
_ALWAYS = (BASELINE, PERFECT, ORACLE)
_ONE_OF_EACH = (PROBABILITIES, ENTROPIES, PAPERS, HEADS, AUTO)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One dataset at one cost."""

    dataset: str
    costs: str
    """Title of the costs."""
    verdict: str
    """The sentence, and a second one where it has to be qualified."""
    stages: Sequence[Stage]
    """Where the oracle's gain goes, from the best fixed length on."""
    table: Table
    """The stages and, in its note, what else decides."""
    sheet: Table
    """Every row."""
    deciding: Sequence[str]
    """Families that decide: those of the stages, and the best of each kind of policy."""
    best: str
    """Family that is fastest on dev of those that can be run."""
    explained: str
    """Name of the best head in words; empty where there are no heads."""
    picture: Plot
    """Where the oracle's gain goes."""

    def sentence(self, *, is_one_of_several: bool) -> str:
        """The verdict, with the name of the dataset where there are several."""
        return f"{self.dataset}. {self.verdict}" if is_one_of_several else self.verdict

    def printed(self, *, has_all: bool) -> list[Table]:
        """The sheets for a console, the best row in bold: the stages and, if wanted, every row."""
        best, num_stages = family(self.best).label, sum(stage.result is not None for stage in self.stages)
        bold = [
            {name: f"[bold]{cell}[/bold]" if cell and row["policy"] == best else cell for name, cell in row.items()}
            for row in self.sheet.rows
        ]
        stages = console_sheet(self.table, best=best, more=len(bold) - 1 - num_stages)
        return [stages, self.sheet._replace(rows=bold)] if has_all else [stages]


def answer_of(judged: Judged, cost: Times, *, heads: Mapping[str, AcceptanceHead], num_prompts: int) -> Answer:
    """Sentence, rows and picture of one dataset at one cost."""
    names = {row.family: head for row in judged.results if (head := head_in(row.name))}
    champion = names.get(judged.yardstick.champions.get(HEADS, ""), "")
    sheet = result_sheet(judged.results, cost, dataset=judged.dataset, num_prompts=num_prompts)
    deciding, stages = deciding_families(judged, cost), stages_of(judged, heads=names)
    beside = [
        f"{' at '.join(filter(None, (family(result.family).label, values_of(result.setting))))}: {result.gain.words}"
        for result in judged.results
        if result.family in set(deciding) - {stage.family for stage in stages}
    ]
    return Answer(
        dataset=judged.dataset,
        costs=cost.title,
        verdict=verdict_of(judged, cost, names=names, num_prompts=num_prompts),
        stages=stages,
        table=stage_sheet(stages, cost, title=sheet.title, beside=beside),
        sheet=sheet,
        deciding=deciding,
        best=best_runnable(judged, cost),
        explained=f"{champion}: {explained(heads[champion])}" if champion in heads else "",
        picture=stage_plot(stages, cost, dataset=judged.dataset),
    )


def best_runnable(judged: Judged, cost: Times) -> str:
    """The family that is fastest on dev of those that can be run."""
    speeds = judged.speeds_on_dev(cost)
    return max((name for name in speeds if family(name).kind != BOUND), key=speeds.__getitem__)


def deciding_families(judged: Judged, cost: Times) -> list[str]:
    """The families whose rows decide, in the order of the table: the best fixed length, the best on dev of each kind of
    policy, every policy of one's own, the perfect head and the oracle.
    """
    speeds = judged.speeds_on_dev(cost)
    shown = {*_ALWAYS, *judged.yardstick.champions.values()}
    for kind in _ONE_OF_EACH:
        members = [name for name in speeds if family(name).kind == kind]
        shown |= {max(members, key=speeds.__getitem__)} if members else set()
    shown |= {name for name in speeds if family(name).kind in (CUSTOM, ENGINES)}
    return [result.family for result in judged.results if result.family in shown]


def verdict_of(judged: Judged, cost: Times, *, names: Mapping[str, str], num_prompts: int) -> str:
    """The sentence that an evaluation ends with.

    Args:
        judged: the dataset at this cost.
        cost: the times.
        names: family -> name of the head that stands for it.
        num_prompts: of the test split.
    """
    results = {result.family: result for result in judged.results}
    free = results[judged.yardstick.champions[TRAINING_FREE]]
    champion = judged.yardstick.champions.get(HEADS)
    own = results[champion] if champion else free
    what = _as_said(own, names.get(own.family, ""))
    length = next(iter(results[BASELINE].setting.values()))
    if own.family == BASELINE:
        return f"{cost.where}: no policy that needs no training is faster than the best fixed length ({length})."
    sentence = f"{cost.where}: {what}, predicted {own.gain.words} over the best fixed length ({length})"
    lead = lead_of(judged.yardstick)
    if lead is None:
        return f"{sentence}. It needs no training, and no trained heads are compared with it."
    over = "" if free.family == BASELINE else f", {lead.words} over {_rival(free.family)}, which needs no training"
    return f"{sentence}{over}.{_doubt(lead, free.family, num_prompts)}"


def explained(head: AcceptanceHead) -> str:
    """What the name of an exported head says, in words."""
    symbols = [_SCALARS.get(name, SCALARS[name].symbol) for name in head.inputs.scalars]
    inputs = ["the draft's hidden state", *symbols, *(["the token's embedding"] if head.inputs.embedding else [])]
    listed = " and ".join([", ".join(inputs[:-1]), inputs[-1]] if len(inputs) > 1 else inputs)
    depth = "a linear layer" if not head.depth else f"{head.depth} hidden layer{'s' * (head.depth > 1)}"
    weight = head.provenance.reject_weight / head.provenance.accept_weight
    weighed = "" if weight == 1 else f", trained with rejections weighed {weight:g} times"
    scored = f"a {TIMING_LABELS[head.timing]} head scores a token {_SCORED[head.timing]}"
    return f"{scored}; this one reads {listed}, and has {depth}{weighed}"


def _as_said(result: Result, head: str) -> str:
    value = values_of(result.setting)
    return f"{f'head {head}' if head else family(result.family).label}{f' at {value}' if value else ''}"


def _rival(rival: str) -> str:
    name = family(rival).label
    return f"the {name}" if name[0].islower() else name


def _doubt(lead: Gain, free_family: str, num_prompts: int) -> str:
    if lead.high < 0:
        return f" No trained head is faster here: use {_rival(free_family)}."
    if lead.low > 0:
        return ""
    rival = "the best fixed length" if free_family == BASELINE else _rival(free_family)
    return (
        f" With {num_prompts} test prompts this difference could be chance, and {rival} may be as fast; raise "
        "decode.num_test to settle it."
    )
