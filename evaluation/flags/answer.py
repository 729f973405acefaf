"""What `flags` prints: the table, the sentences, the line to paste."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evaluation.competitor import label_of
from evaluation.flag_types import EngineName
from evaluation.flags.choice import DEFAULT, FIXED, FLAGS, NONE, Choice, Contest
from evaluation.table import Table

_BASES = {DEFAULT: "default", FIXED: "fixed length", NONE: "no speculation"}
"""Competitors that gains are measured from, and their names in columns."""


@dataclass(frozen=True)
class Answer:
    """One engine at one cost, with every competitor."""

    name: EngineName
    contest: Contest
    choices: Mapping[str, Choice]

    @property
    def flags(self) -> Choice:
        """The engine at its best setting, or without speculation where that is faster."""
        return self.choices[FLAGS]

    @property
    def speculates(self) -> bool:
        """Whether any setting is faster on dev than the target alone."""
        return self.flags.drafting is not None

    @property
    def line(self) -> str:
        """The line to paste."""
        engine, flags = self.contest.engine, self.flags
        return engine.off if flags.drafting is None else engine.line(flags.setting, flags.drafting)

    @property
    def bases(self) -> dict[str, Choice]:
        """Competitors that gains are measured from."""
        return {name: self.choices[name] for name in _BASES if name in self.choices}

    @property
    def short_of_hindsight(self) -> float:
        """How much slower the flags are than the best setting on test, as a share of its speed."""
        options = [self.contest.none, *self.contest.options]
        return 1 - self.flags.tokens_per_s / max(option.tokens_per_s for option in options)

    def as_dict(self) -> dict[str, Any]:
        """The answer in JSON."""
        return {
            "engine": self.name,
            "version": self.contest.engine.version,
            "line": self.line,
            "speculates": self.speculates,
            "short_of_hindsight": self.short_of_hindsight,
            "choices": [
                {
                    "what": name,
                    "drafts": choice.label,
                    "setting": dict(choice.setting),
                    "tokens_per_s": choice.tokens_per_s,
                    "gains": {base: choice.over(other)._asdict() for base, other in self.bases.items()},
                }
                for name, choice in self.choices.items()
            ],
        }

    def sheet(self) -> Table:
        """A row per competitor, with its predicted gain over the default, the best fixed length and no speculation."""
        engine = self.contest.engine
        rows = [
            {
                "what": name,
                "setting": _setting_of(choice, has_several=len(engine.draftings) > 1),
                "tokens/s": f"{choice.tokens_per_s:.1f}",
                **{
                    f"over {_BASES[base]}": "" if other is choice else choice.over(other).text
                    for base, other in self.bases.items()
                },
            }
            for name, choice in self.choices.items()
        ]
        note = (
            "gain: predicted from counts and times (law 4.9) on test, with its 95 % interval (paired bootstrap of test "
            f"prompts). Rows of ours need our loop or plugin. The rule is that of {self.name} {engine.version}. These "
            f"flags are {self.short_of_hindsight:.1%} slower than the best setting on test"
        )
        return Table(f"{self.name}: settings chosen on dev; {self.contest.alone.title}", rows, note, names=2)

    def sentences(self) -> Iterator[str]:
        """The answer in sentences."""
        flags, none, default = self.flags, self.choices[NONE], self.choices.get(DEFAULT)
        if self.speculates:
            bases = {NONE: "no speculation", DEFAULT: "the default", FIXED: "the best fixed length"}
            gains = {words: flags.over(self.choices[base]) for base, words in bases.items() if base in self.choices}
            listed = ", ".join(f"{gain.words} over {words}" for words, gain in gains.items())
            doubt = "" if flags.over(none).low > 0 else " This could be chance; raise decode.num_test to settle it."
            yield f"{self.contest.alone.where}: {label_of('', flags.setting)}, predicted {listed}.{doubt}"
        else:
            yield (
                f"{self.contest.alone.where}: do not speculate. No setting of {self.name} is predicted to be faster "
                "than the target alone on dev."
            )
        if default is not None and default.over(none).value < 0:
            yield f"{self.name}'s default is predicted to be slower: {default.over(none).words} over no speculation."
        for name, choice in self.choices.items():
            if name.startswith("our "):
                yield f"{name[0].upper()}{name[1:]} ({choice.label}) would add {choice.over(flags).words}."
        if self.contest.engine.remark:
            yield self.contest.engine.remark


def _setting_of(choice: Choice, *, has_several: bool) -> str:
    label = label_of("", choice.setting)
    if choice.drafting is None:
        return f"{choice.label}: {label}" if choice.label else "-"
    return f"{label}; {choice.label}" if has_several else label
