"""The curves of law 4.13: derived from the times of one sequence, or as `evaluation bench --batch` measured them, kept
in DIR/batch_costs.jsonl for `evaluation evaluate --batch`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from decode.experiment import Experiment
from decode.policies.batch import BatchCosts, Curve
from evaluation.costs.machine import loop_key, recorded
from evaluation.times import MEASURED, RECORDED, Times
from store.json_files import KeyedStore


class BatchTimes(NamedTuple):
    """Times of batches: of one sequence, with what a verified token takes."""

    times: Times
    verify_share: float | None = None
    """Seconds that each further verified token takes, over those of a draft step; None: they were measured."""
    measured: BatchCosts | None = None
    """Curves of the batched loop without stops; None: t_target(k) of one sequence is used as t_target(tokens)."""

    def curves(self, stop_kind: str) -> BatchCosts:
        """The curves of law 4.13 for policies of one kind of stop; only measured draft steps depend on the number of
        sequences.
        """
        times, stop_s = self.times, self.times.stop_s(stop_kind)
        if self.measured is not None:
            return BatchCosts(self.measured.draft.plus(stop_s), self.measured.target)
        draft, seconds = Curve.line(times.t_draft_s + stop_s), times.t_target_s
        if self.verify_share is not None:
            return BatchCosts(draft, Curve.line(seconds[0], self.verify_share * times.t_draft_s))
        return BatchCosts(draft, Curve(tuple(float(k) for k in range(1, len(seconds) + 1)), seconds))

    @property
    def title(self) -> str:
        """Name of the setup in titles of tables."""
        if self.verify_share is not None:
            return f"{self.times.title}; a verified token costs {self.verify_share:g} t_draft"
        return f"{self.times.title}; curves of {'one sequence' if self.measured is None else 'batches'}"


def setups_of(
    every_times: Sequence[Times], verify_shares: Sequence[float], measured: BatchCosts | None = None
) -> list[BatchTimes]:
    """All times with every share of a verified token; measured or recorded times once, with the curves if there are
    any.
    """
    setups: list[BatchTimes] = []
    for times in every_times:
        has_curves = times.origin in (MEASURED, RECORDED) or not times.is_flat
        setups += [BatchTimes(times, None, measured)] * has_curves
        setups += [BatchTimes(times, share) for share in verify_shares if not has_curves]
    return setups


def keep_curves(experiment: Experiment, curves: BatchCosts) -> Path:
    """Write them, with the loop that they are of; the file."""
    store = curves_store(experiment)
    store.keep([(loop_key(experiment), {name: asdict(curve) for name, curve in curves._asdict().items()})])
    return store.path


def kept_curves(experiment: Experiment) -> BatchCosts | None:
    """Curves that were measured with this very loop, or with that of the record; None where there are none."""
    store = curves_store(experiment)
    curves = recorded(store, experiment) if experiment.decode.as_recorded else store.get(loop_key(experiment))
    if curves is None:
        return None
    return BatchCosts(
        **{name: Curve(tuple(curve["numbers"]), tuple(curve["seconds"])) for name, curve in curves.items()}
    )


def curves_store(experiment: Experiment) -> KeyedStore:
    """The curves of every loop that was measured."""
    remedy = "delete the line, and measure again with `evaluation bench --batch`"
    return KeyedStore(experiment.directory / "batch_costs.jsonl", remedy=remedy, fields=BatchCosts._fields)
