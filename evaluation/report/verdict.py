"""The sentence of an evaluation, and what is printed with it.

The sentence names the best head, the best policy that needs no training and the best fixed length, each chosen on dev,
with the gains that the tables have. If the interval does not show that training pays, the sentence says so. Everything
is predicted from counts and times (law 4.9).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from evaluation.contest import Contest, Result, fastest
from evaluation.families import (
    AUTO,
    BASELINE,
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
from evaluation.report.results import result_table, values_of
from evaluation.report.stages import Stage, console_table, stage_plot, stage_table, stages_of
from evaluation.table import Table
from heads.model.head import TIMING_LABELS, AcceptanceHead
from lm.signals import SCALARS

_SCORED = {
    "drawn": "the moment it is drawn",
    "fed": "once the draft has read it, one forward later (as SpecDec++ does)",
    "prefix": "before it is drawn",
    "candidate": "as a candidate of a tree",
}
_SCALARS = {
    "log_token_prob": "the token's log-probability",
    "entropy": "the entropy of the draft's distribution",
    "text_position": "the token's position in the response",
}
_ALWAYS = (BASELINE, PERFECT, ORACLE)
_ONE_OF_EACH = (PROBABILITIES, ENTROPIES, PAPERS, HEADS, AUTO)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one contest says."""

    contest: Contest
    verdict: str
    """The sentence, and a second one where it has to be qualified."""
    stages: Sequence[Stage]
    """Where the oracle's gain goes."""
    table: Table
    """The stages and, in its note, what else decides."""
    deciding: Sequence[str]
    """Families that decide: those of the stages, and the best of each kind of policy."""
    explained: str
    """Name of the best head in words; empty where there are no heads."""

    @cached_property
    def picture(self) -> Plot:
        """The stages as bars."""
        return stage_plot(self.stages, self.contest)

    @property
    def best(self) -> str:
        """Label of the policy that is fastest on dev of those that can be run."""
        return family(self.contest.best.family).label

    def printed(self, *, has_all: bool) -> list[Table]:
        """The tables for a console, the best row in bold: the stages and, on request, every row."""
        num_stages = sum(stage.result is not None for stage in self.stages)
        stages = console_table(self.table, best=self.best, more=len(self.contest.results) - num_stages)
        if not has_all:
            return [stages]
        every = result_table(self.contest)
        bold = [
            {
                name: f"[bold]{cell}[/bold]" if cell and row["policy"] == self.best else cell
                for name, cell in row.items()
            }
            for row in every.rows
        ]
        return [stages, every._replace(rows=bold)]


def answer_of(contest: Contest, *, heads: Mapping[str, AcceptanceHead]) -> Answer:
    """Sentence and stages of a contest; `heads`: by name."""
    deciding, stages = deciding_families(contest), stages_of(contest)
    beside = [
        f"{' at '.join(filter(None, (family(name).label, values_of(contest.results[name].setting))))}: "
        f"{contest.gain(name).words}"
        for name in deciding
        if name not in {stage.family for stage in stages}
    ]
    best = contest.leaders[HEADS].competitor.head if HEADS in contest.leaders else ""
    return Answer(
        contest=contest,
        verdict=verdict_of(contest),
        stages=stages,
        table=stage_table(stages, contest, beside=beside),
        deciding=deciding,
        explained=f"{best}: {explained(heads[best])}" if best in heads else "",
    )


def deciding_families(contest: Contest) -> list[str]:
    """The families whose rows decide, in the order of the table: the best fixed length, the best on dev of each kind of
    policy, every custom policy, the perfect head and the oracle.
    """
    shown = {*_ALWAYS, *(result.family for result in contest.leaders.values())}
    for kind in _ONE_OF_EACH:
        if members := [result for name, result in contest.results.items() if family(name).kind == kind]:
            shown.add(fastest(members).family)
    shown |= {name for name in contest.results if family(name).kind in (CUSTOM, ENGINES)}
    return [name for name in contest.results if name in shown]


def verdict_of(contest: Contest) -> str:
    """The sentence that an evaluation ends with."""
    where, free = contest.times.where, contest.leaders[TRAINING_FREE]
    best = contest.leaders.get(HEADS, free)
    length = next(iter(contest.baseline.setting.values()))
    if best.family == BASELINE:
        return f"{where}: no policy that needs no training is faster than the best fixed length, {length}."
    gain = contest.gain(best.family).words
    sentence = f"{where}: {_named(best)}, predicted {gain} over the best fixed length, {length}"
    lead = contest.lead
    if lead is None:
        return f"{sentence}. It needs no training, and no trained heads are compared with it."
    over = "" if free.family == BASELINE else f", and {lead.words} over {_rival(free.family)}, which needs no training"
    return f"{sentence}{over}.{doubt_of(lead, free.family, contest.num_prompts)}"


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


def _named(result: Result) -> str:
    value, head = values_of(result.setting), result.competitor.head
    return f"{f'head {head}' if head else family(result.family).label}{f' at {value}' if value else ''}"


def _rival(rival: str) -> str:
    name = family(rival).label
    return f"the {name}" if name[0].islower() else name


def doubt_of(lead: Gain, free_family: str, num_prompts: int) -> str:
    if lead.high < 0:
        return f" No trained head is faster here: use {_rival(free_family)}."
    if lead.low > 0:
        return ""
    rival = "the best fixed length" if free_family == BASELINE else _rival(free_family)
    return (
        f" With {num_prompts} test prompts this difference could be chance, and {rival} may be as fast; raise "
        "decode.num_test to settle it."
    )
