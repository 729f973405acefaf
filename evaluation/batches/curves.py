"""The curves of law 4.13: derived from the times of one sequence, or as `evaluation bench --batch` measured them, kept
in DIR/batch_costs.jsonl for `evaluation evaluate --batch`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from decode.experiment import Experiment
from decode.policies.batch import BatchCosts, Curve
from evaluation.costs.machine import loop_key, recorded_times
from evaluation.times import MEASURED, RECORDED, Times
from store.json_files import KeyedStore


def setups_of(
    every_times: Iterable[Times], verify_shares: Sequence[float], measured: BatchCosts | None = None
) -> list[tuple[Times, float | None]]:
    """Times of batches, each with what a further verified token takes over a draft step: all times with every share;
    measured or recorded times, and those of a target's curve, once with None: with the `measured` curves if there are
    any, else with that of one sequence. ValueError if there are none.
    """
    setups: list[tuple[Times, float | None]] = []
    for times in every_times:
        if times.origin not in (MEASURED, RECORDED) and times.is_flat:
            for share in verify_shares:
                target = Curve.line(times.alone_s, share * times.t_draft_s)
                setups.append((replace(times, target=target), share))
        elif measured is None:
            setups.append((times, None))
        else:
            setups.append((replace(times, draft=measured.draft, target=measured.target), None))
    if not setups:
        raise ValueError(
            "decode.verify_shares is empty, and no times here say what verifying a batch takes; give a share, such as "
            "0.2, or decode.t_target_ms by number of tokens"
        )
    return setups


def keep_curves(experiment: Experiment, curves: BatchCosts) -> Path:
    """Write them, with the loop that they are of; the file."""
    store = curves_store(experiment)
    store.keep([(loop_key(experiment), {name: asdict(curve) for name, curve in curves._asdict().items()})])
    return store.path


def kept_curves(experiment: Experiment) -> BatchCosts | None:
    """Curves that were measured with this very loop, or with that of the record; None where there are none."""
    store = curves_store(experiment)
    curves = recorded_times(store, experiment) if experiment.decode.as_recorded else store.get(loop_key(experiment))
    if curves is None:
        return None
    return BatchCosts(
        **{name: Curve(tuple(curve["numbers"]), tuple(curve["seconds"])) for name, curve in curves.items()}
    )


def curves_store(experiment: Experiment) -> KeyedStore:
    """The curves of every loop that was measured."""
    remedy = "delete the line, and measure again with `evaluation bench --batch`"
    return KeyedStore(experiment.directory / "batch_costs.jsonl", remedy=remedy, fields=BatchCosts._fields)
