"""What a competitor did on the prompts of one split: counts, which times turn into seconds (law 4.9)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int, Num

from decode.loop.counts import Counts
from evaluation.gain import Throughput

Array = np.ndarray
_PERCENTILES = (50, 95)


@dataclass(frozen=True)
class Played:
    """Counts of every setting on every prompt."""

    counts: Counts
    """Arrays [setting, row]."""
    lengths: Int[Array, "setting row lengths"]
    """Rounds by the number of tokens drafted, 0 to max_draft_length."""
    prompt_of_row: Int[Array, " row"]
    """Number of each row's prompt, as the trace has it."""
    stop_kind: str = ""
    """`Policy.stop_kind`."""
    micro_stop_kind: str = ""
    """That of the level below the draft, in a hierarchy."""
    seconds: Mapping[str, Float[Array, "setting row"]] | None = None
    """On a clock: `whole_s` of the generation, `first_token_s`, and the sums over rounds `drafting_s` and `verifying_s`
    (`evaluation.sources.clock`); None of a replay.
    """
    later: "Played | None" = None
    """On a clock: the same without the rounds that read the prompts."""

    @property
    def throughput(self) -> Throughput:
        """Tokens and clocked seconds of every setting on every prompt; ValueError of a replay, which has no clock."""
        if self.seconds is None:
            raise ValueError("a replay has no seconds; times turn its counts into them (`Times.throughput`)")
        return Throughput(self.per_prompt(self.counts.num_emitted), self.per_prompt(self.seconds["whole_s"]))

    def select(
        self,
        settings: Sequence[int] | Int[Array, " some_settings"],
        rows: Sequence[int] | Int[Array, " some_rows"] | None = None,
    ) -> "Played":
        """Some of the settings, on all rows or some."""
        all_rows = range(len(self.prompt_of_row))
        at = np.ix_(np.asarray(settings, dtype=int), np.asarray(all_rows if rows is None else rows, dtype=int))
        counts = {name: values[at] for name, values in self._counted()}
        return replace(
            self,
            counts=Counts(**counts),
            lengths=self.lengths[at],
            prompt_of_row=self.prompt_of_row[at[1][0]],
            seconds=self.seconds and {name: part[at] for name, part in self.seconds.items()},
            later=self.later and self.later.select(settings, rows),
        )

    def total(self, setting: int = 0) -> Counts:
        """One setting's totals over prompts."""
        return Counts(**{name: int(values[setting].sum()) for name, values in self._counted()})

    def _counted(self) -> list[tuple[str, Array]]:
        return [(name, values) for name, values in vars(self.counts).items() if isinstance(values, np.ndarray)]

    def per_prompt(self, amounts: Num[Array, "setting row"]) -> Num[Array, "setting prompt"]:
        """Amounts of every row, summed over the rows of each prompt, so that columns are independent."""
        order = self.prompt_of_row.argsort(kind="stable")
        _, starts = np.unique(self.prompt_of_row[order], return_index=True)
        return np.add.reduceat(amounts[:, order], starts, axis=1)


def latency_of(played: Played) -> dict[str, float]:
    """Percentiles over the requests of the first setting: seconds of a whole request, and until its first token."""
    assert played.seconds is not None
    parts = {"request": played.seconds["whole_s"][0], "first_token": played.seconds["first_token_s"][0]}
    return {
        f"{part}_p{percentile}_s": float(np.percentile(seconds, percentile))
        for part, seconds in parts.items()
        for percentile in _PERCENTILES
    }


def joined(every: Sequence[Played]) -> Played:
    """What the same settings did on several traces, their prompts one after the other."""
    names = [name for name, _ in every[0]._counted()]
    counts = {name: np.concatenate([getattr(part.counts, name) for part in every], axis=1) for name in names}
    firsts = np.cumsum([0, *(int(part.prompt_of_row.max()) + 1 for part in every)])
    prompts = [first + part.prompt_of_row for first, part in zip(firsts, every, strict=False)]
    clocked = [part.seconds for part in every if part.seconds is not None]
    seconds = {}
    for name in clocked[0] if clocked else ():
        seconds[name] = np.concatenate([part[name] for part in clocked], axis=1)
    later = [part.later for part in every if part.later is not None]
    return replace(
        every[0],
        counts=Counts(**counts),
        lengths=_side_by_side([part.lengths for part in every]),
        prompt_of_row=np.concatenate(prompts),
        seconds=seconds or None,
        later=joined(later) if later else None,
    )


def _side_by_side(every: Sequence[Int[Array, "setting _ _"]]) -> Int[Array, "setting row lengths"]:
    """Rows one after the other; traces may differ in the longest draft."""
    longest = max(lengths.shape[-1] for lengths in every)
    padded = [np.pad(lengths, ((0, 0), (0, 0), (0, longest - lengths.shape[-1]))) for lengths in every]
    return np.concatenate(padded, axis=1)
