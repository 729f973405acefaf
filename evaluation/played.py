"""What a competitor did on the prompts of one split: counts, which times turn into seconds (law 4.9)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int, Num

from decode.loop.rounds import Counts

Array = np.ndarray


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

    def select(
        self, settings: Sequence[int] | Int[Array, " some_settings"], rows: Sequence[int] | None = None
    ) -> "Played":
        """Some of the settings, on all rows or some."""
        all_rows = range(len(self.prompt_of_row))
        at = np.ix_(np.asarray(settings, dtype=int), np.asarray(all_rows if rows is None else rows, dtype=int))
        counts = {name: values[at] for name, values in self._counted()}
        return replace(
            self, counts=Counts(**counts), lengths=self.lengths[at], prompt_of_row=self.prompt_of_row[at[1][0]]
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


def joined(every: Sequence[Played]) -> Played:
    """What the same settings did on several traces, their prompts one after the other."""
    names = [name for name, _ in every[0]._counted()]
    counts = {name: np.concatenate([getattr(part.counts, name) for part in every], axis=1) for name in names}
    firsts = np.cumsum([0, *(int(part.prompt_of_row.max()) + 1 for part in every)])
    prompts = [first + part.prompt_of_row for first, part in zip(firsts, every, strict=False)]
    lengths = np.concatenate([part.lengths for part in every], axis=1)
    return replace(every[0], counts=Counts(**counts), lengths=lengths, prompt_of_row=np.concatenate(prompts))
