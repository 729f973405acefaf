"""What `flags` prints: the table, the sentences, the line to paste."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.contest.grids import label_of
from evaluation.costs.model import CostModel
from evaluation.flag_types import EngineName
from evaluation.flags.choice import DEFAULT, FIXED, FLAGS, NONE, Choice, Contest
from evaluation.flags.engines import Engine
from evaluation.flags.in_batches import BatchChoice
from evaluation.sheet import Sheet

_BASES = {DEFAULT: "default", FIXED: "fixed length", NONE: "no speculation"}
"""Competitors that gains are measured from, and their names in columns."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One engine at one cost."""

    name: EngineName
    engine: Engine
    choices: Mapping[str, Choice]
    cost: CostModel
    best_on_test: float
    """Tokens per second on test of the setting that is best there."""

    @classmethod
    def of(cls, name: EngineName, contest: Contest, others: Mapping[str, Choice]) -> "Answer":
        """The answer of a contest, with what competes beside the engine."""
        return cls(
            name=name,
            engine=contest.engine,
            choices={**contest.choices(), **others},
            cost=contest.times.alone,
            best_on_test=contest.best_on_test,
        )

    @property
    def flags(self) -> Choice:
        """The engine at its best setting, or without speculation where that is faster."""
        return self.choices[FLAGS]

    @property
    def speculates(self) -> bool:
        """Whether any setting is faster on dev than the target alone."""
        return self.flags.option.drafting is not None

    @property
    def line(self) -> str:
        """The line to paste."""
        option = self.flags.option
        return self.engine.off if option.drafting is None else self.engine.line(option.setting, option.drafting)

    @property
    def bases(self) -> dict[str, Choice]:
        """Competitors that gains are measured from."""
        return {name: self.choices[name] for name in _BASES if name in self.choices}

    @property
    def short_of_hindsight(self) -> float:
        """How far the flags stay behind the setting that would have been best on test, as a share of its speed."""
        return 1 - self.flags.tokens_per_s / self.best_on_test

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        return {
            "engine": self.name,
            "version": self.engine.version,
            "line": self.line,
            "speculates": self.speculates,
            "short_of_hindsight": self.short_of_hindsight,
            "choices": [
                {
                    "what": name,
                    "drafts": choice.option.label,
                    "setting": dict(choice.option.setting),
                    "tokens_per_s": choice.tokens_per_s,
                    "gains": {base: choice.over(other)._asdict() for base, other in self.bases.items()},
                }
                for name, choice in self.choices.items()
            ],
        }


def answer_sheet(answer: Answer) -> Sheet:
    """A row per competitor, with its predicted gain over the default, the best fixed length and no speculation."""
    rows = [
        {
            "what": name,
            "setting": _setting_of(choice, has_several=len(answer.engine.draftings) > 1),
            "tokens/s": f"{choice.tokens_per_s:.1f}",
            **{
                f"over {_BASES[base]}": "" if other is choice else choice.over(other).text
                for base, other in answer.bases.items()
            },
        }
        for name, choice in answer.choices.items()
    ]
    note = (
        "gain: predicted from counts and times (law 4.9) on test, with its 95 % interval (paired bootstrap of test "
        "prompts, at the settings that dev chose). What is called ours has no flag: it takes our loop "
        f"or plugin. The rule is that of {answer.name} {answer.engine.version}. These flags stay "
        f"{answer.short_of_hindsight:.1%} behind the setting that would have been best on test"
    )
    return Sheet(f"{answer.name}: settings chosen on dev; {answer.cost.title}", rows, note, names=2)


def _setting_of(choice: Choice, *, has_several: bool) -> str:
    label = label_of("", choice.option.setting)
    if choice.option.drafting is None:
        return f"{choice.option.label}: {label}" if choice.option.label else "-"
    return f"{label}; {choice.option.label}" if has_several else label


def sentences_of(answer: Answer) -> Iterator[str]:
    """The answer in sentences."""
    flags, none = answer.flags, answer.choices[NONE]
    if not answer.speculates:
        yield (
            f"{answer.cost.where}: do not speculate. No setting of {answer.name} is predicted to be faster than the "
            "target alone on dev."
        )
    else:
        gain = flags.over(none)
        doubt = "" if gain.low > 0 else " That is not beyond chance: more test prompts (decode.num_test) would tell."
        yield (
            f"{answer.cost.where}: {label_of('', flags.option.setting)}, predicted {gain.words} over no speculation"
            f"{_beside(answer)}.{doubt}"
        )
    default = answer.choices.get(DEFAULT)
    if default is not None and default.over(none).value < 0:
        yield f"{answer.name}'s default is predicted {default.over(none).words} against no speculation: it loses."
    for name, choice in answer.choices.items():
        if name.startswith("our "):
            yield f"{name[0].upper()}{name[1:]} ({choice.option.label}) would add {choice.over(flags).words}."
    if answer.engine.remark:
        yield answer.engine.remark


def _beside(answer: Answer) -> str:
    """The gains over default and best fixed length, as a sentence goes on."""
    named = {DEFAULT: "the default", FIXED: "the best fixed length"}
    gains = {words: answer.flags.over(answer.choices[base]) for base, words in named.items() if base in answer.choices}
    return "".join(f", {gain.words} over {words}" for words, gain in gains.items())


def batch_sheet(chosen: Sequence[BatchChoice], cost: CostModel) -> Sheet:
    """A row per size of batch: the number that is fastest there."""
    rows = [
        {
            "batch": f"{choice.size}",
            "number": f"{choice.number}" if choice.number else "0 (do not speculate)",
            "tokens/s": f"{choice.tokens_per_s:.1f}",
            "over no speculation": f"{choice.over_none:+.1%}",
            "over one number for all": f"{choice.over_one:+.1%}",
        }
        for choice in chosen
    ]
    note = (
        "numbers of drafted tokens chosen on dev, tokens/s of the whole batch on test; predicted (law 4.13). One "
        "number for all: that of one sequence. No interval: a batch mixes prompts"
    )
    return Sheet(f"by sequences in a batch; {cost.title}", rows, note)


def batch_line(name: EngineName, chosen: Sequence[BatchChoice]) -> str:
    """The numbers as the engine takes them: vLLM for every size in one setting, others one server for each."""
    if name != "vllm":
        return "; ".join(f"{choice.size} sequences: {choice.number}" for choice in chosen)
    ranges: list[list[int]] = []
    for choice in chosen:
        if ranges and ranges[-1][2] == choice.number:
            ranges[-1][1] = choice.size
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, choice.size, choice.number])
    most = max(choice.number for choice in chosen)
    return f'"num_speculative_tokens": {most}, "num_speculative_tokens_per_batch_size": {ranges}'
