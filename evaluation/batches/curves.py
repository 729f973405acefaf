"""The curves of law 4.13 as `evaluation bench --batch` measured them, kept in DIR/batch_costs.jsonl for `evaluation
evaluate --batch`.
"""

from dataclasses import asdict
from pathlib import Path

from decode.experiment import Experiment
from decode.policies.batch import BatchCosts, Curve
from evaluation.costs.machine import loop_key, recorded
from store.keyed import KeyedStore


def keep_curves(experiment: Experiment, curves: BatchCosts) -> Path:
    """Write them, with the loop that they are of; the file."""
    store = curves_store(experiment)
    store.keep([(loop_key(experiment), {name: asdict(curve) for name, curve in curves._asdict().items()})])
    return store.path


def kept_curves(experiment: Experiment) -> BatchCosts | None:
    """Curves that were measured with this very loop, or with that of the record; None where there are none.

    Raises:
        ValueError: a file that holds something else.
    """
    store = curves_store(experiment)
    curves = recorded(store, experiment) if experiment.decode.as_recorded else store.get(loop_key(experiment))
    if curves is None:
        return None
    return BatchCosts(
        **{name: Curve(*(tuple(curve[axis]) for axis in ("numbers", "seconds"))) for name, curve in curves.items()}
    )


def curves_store(experiment: Experiment) -> KeyedStore:
    """The curves of every loop that was measured; batches run eagerly, whatever decode.compile says."""
    remedy = "delete the line, and measure anew with `evaluation bench --batch`"
    return KeyedStore(experiment.directory / "batch_costs.jsonl", remedy=remedy, fields=BatchCosts._fields)
