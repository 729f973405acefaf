"""The curves of law 4.13 as `evaluation bench --batch` measured them, kept in DIR/batch_costs.json for `evaluation evaluate --batch`."""

import json
from dataclasses import asdict
from pathlib import Path

from decode.experiment import Experiment
from decode.policies.batch import BatchCosts, Curve
from evaluation.costs.machine import key_of
from store.shards import write_atomic

_NAME = "batch_costs.json"


def keep_curves(experiment: Experiment, curves: BatchCosts) -> Path:
    """Write them, with the loop that they are of; the file."""
    path = experiment.directory / _NAME
    document = {"loop": key_of(experiment), "curves": {name: asdict(curve) for name, curve in curves._asdict().items()}}
    write_atomic(path, json.dumps(document, indent=1).encode())
    return path


def kept_curves(experiment: Experiment) -> BatchCosts | None:
    """What was measured of this very loop; None where nothing was.

    Raises:
        ValueError: a file that holds something else.
    """
    path = experiment.directory / _NAME
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text())
        found = {name: Curve(*(tuple(curve[key]) for key in ("numbers", "seconds"))) for name, curve in document["curves"].items()}
        return BatchCosts(**found) if document["loop"] == json.loads(json.dumps(key_of(experiment))) else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what `evaluation bench --batch` writes ({error}); delete it, and measure anew") from error
