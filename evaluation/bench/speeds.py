"""Times as wished: how many layers that change nothing (`lm.expanded`) make draft and target so slow.

A forward is timed at two depths, and the line through both gives the depth for any time; once more from there. What the
loop adds to a bare forward, and a stop to a draft step, costs the same seconds at every depth: a slow pair costs what
the pair itself costs, and the difference of its bare forwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from configs.schema import Config, ModelSource, PairConfig
from evaluation.costs.model import CostModel
from evaluation.turns import in_turns
from lm import CachedModel, load_model

_PROBED_LAYERS = 8
_REPEATS = 7
_LENGTHS = (0, 1, 4, 10, 20)
"""k of t_target(k) that are timed; a line lies between them."""


class Speed(NamedTuple):
    """Times of a pair that was made slow by layers that change nothing."""

    draft_layers: int
    """Layers that were added to the draft."""
    target_layers: int
    cost: CostModel

    def of(self, config: Config) -> Config:
        """The experiment with so many extra layers."""
        draft, target = deeper(config.pair.draft, self.draft_layers), deeper(config.pair.target, self.target_layers)
        return replace(config, pair=replace(config.pair, draft=draft, target=target))

    def as_dict(self) -> dict[str, Any]:
        """JSON values; `speed_from` reads them."""
        times = {"t_draft_s": self.cost.t_draft_s, "t_target_s": list(self.cost.t_target_s), "origin": self.cost.origin}
        return {"draft_layers": self.draft_layers, "target_layers": self.target_layers, **times}


def speed_from(values: dict[str, Any], natural: CostModel) -> Speed:
    """Read a speed as `as_dict` wrote it; a stop's seconds are those of `natural`."""
    times = {"t_draft_s": values["t_draft_s"], "t_target_s": tuple(values["t_target_s"]), "origin": values["origin"]}
    return Speed(values["draft_layers"], values["target_layers"], replace(natural, **times))


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Times bare forwards of a pair's models at any depth."""

    models: PairConfig
    vocab_size: int
    prompt: Sequence[int]

    def forwards_s(self, source: ModelSource, extra_layers: int, lengths: Sequence[int] = (0,)) -> list[float]:
        """Median seconds of a forward of 1 + k tokens after the prompt, for each k."""
        slow = load_model(deeper(source, extra_layers))
        model = CachedModel(slow, vocab_size=self.vocab_size)
        ids = list(self.prompt)
        model.forward(ids)
        seconds: dict[int, list[float]] = {length: [] for length in lengths}
        for _, order in in_turns(lengths, range(_REPEATS + 1)):
            for length in order:
                model.roll_back(len(ids) - 1)
                started_s = perf_counter()
                # reading a number waits for the device
                float(model.forward(ids + [ids[-1]] * length, length + 1)[-1, 0])
                seconds[length].append(perf_counter() - started_s)
        return [median(seconds[length][1:]) for length in lengths]

    def slowed(self, natural: CostModel, *, ratio: float, t_draft_s: float) -> Speed:
        """The pair at t_target(0) / t_draft = `ratio`, its draft at least as slow as wished, neither model faster than
        it is.

        Args:
            natural: costs of the pair as it is, in the loop.
            ratio: wished.
            t_draft_s: wished.
        """
        draft, target = self.models.draft, self.models.target
        (bare_draft_s,), bare_target_s = self.forwards_s(draft, 0), self.forwards_s(target, 0, _LENGTHS)
        wished_s = max(t_draft_s, natural.t_draft_s, natural.t_target_s[0] / ratio)
        draft_layers = layers_for(wished_s - natural.t_draft_s + bare_draft_s, partial(self._one_s, draft))
        slow_draft_s = natural.t_draft_s + self._one_s(draft, draft_layers) - bare_draft_s
        target_layers = layers_for(
            ratio * slow_draft_s - natural.t_target_s[0] + bare_target_s[0], partial(self._one_s, target)
        )
        added_s = np.subtract(self.forwards_s(target, target_layers, _LENGTHS), bare_target_s)
        lengths = np.arange(_LENGTHS[-1] + 1)
        slow_target_s = natural.target_s(lengths) + np.interp(lengths, _LENGTHS, added_s)
        times: dict[str, Any] = {"t_draft_s": float(slow_draft_s), "t_target_s": tuple(slow_target_s.tolist())}
        cost = replace(natural, **times, origin=f"{draft_layers} and {target_layers} extra layers")
        return Speed(draft_layers, target_layers, cost)

    def _one_s(self, source: ModelSource, extra_layers: int) -> float:
        return self.forwards_s(source, extra_layers)[0]


def deeper(source: ModelSource, num_layers: int) -> ModelSource:
    """The same model with so many more extra layers."""
    return replace(source, extra_layers=source.extra_layers + num_layers)


def layers_for(wished_s: float, timed: Callable[[int], float]) -> int:
    """How many extra layers make a forward take `wished_s`; none if it takes longer as it is.

    Args:
        wished_s: seconds.
        timed: a function that takes a number of extra layers and returns the seconds of a forward.

    Raises:
        ValueError: a forward does not become slower with more layers.
    """
    first_s = timed(0)
    if first_s >= wished_s:
        return 0
    num_layers = _PROBED_LAYERS
    for _ in range(2):
        layer_s = (timed(num_layers) - first_s) / num_layers
        if layer_s <= 0:
            raise ValueError(
                f"a forward with {num_layers} extra layers takes no longer than without; the machine is too busy to "
                "be timed"
            )
        num_layers = max(1, round((wished_s - first_s) / layer_s))
    return num_layers
