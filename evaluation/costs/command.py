"""python -m evaluation costs: the times of this machine in the real loop, and what each kind of stop adds (law 4.9).

t_draft and t_target(k) are first quartiles over rounds of real generations, with everything that a draft step and a
verification do: the times that evaluations use.
"""

from collections.abc import Mapping
from json import dumps as to_json
from typing import Any

from configs.schema import Config
from decode.experiment import Experiment
from evaluation.costs.machine import kept_costs, times_of
from evaluation.costs.stops import policies_by_kind
from evaluation.table import Table, printing, say

_SHOWN = (0, 1, 2, 5, 10, 20)
"""k of t_target(k) in the table."""
_WORTHWHILE = 3
"""Draft forwards that a target forward must cost for stops to be worth much."""


def costs(config: Config, *, again: bool = False, json: bool = False) -> None:
    """Measure forward times on this machine, and what each kind of stop adds.

    Args:
        config: the experiment; decode.t_draft_s and decode.t_target_s are ignored.
        again: measure once more, and replace the times in DIR/costs.jsonl that evaluations use.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    experiment = Experiment(config)
    times = times_of(experiment, policies_by_kind(experiment.heads.values()), again=again)
    step_s, target_s = times["t_draft_s"], times["t_target_s"]
    seconds = {"t_draft": step_s} | {f"t_target({k})": target_s[k] for k in _SHOWN if k < len(target_s)}
    stops = [
        {
            "stop": kind,
            "us": f"{1e6 * stop_s:.1f}",
            "± us": f"{1e6 * error_s:.1f}",
            "% of a draft step": f"{100 * stop_s / step_s:.1f}",
        }
        for kind, (stop_s, error_s) in sorted(times["stops"].items(), key=lambda entry: entry[1][0])
    ]
    with printing(aside=json):
        forwards = {name: f"{1e3 * value:.3f}" for name, value in seconds.items()}
        Table("milliseconds per forward in the loop", [forwards], names=0).print()
        Table(f"what a stop adds to a draft step of {1e6 * step_s:.0f} us", stops).print()
        print(f"kept in {kept_costs(experiment.directory).path}, where evaluate and tune find them")
        say(verdict_of(times))
        print("next: acceptance-heads evaluate --config …")
    if json:
        print(to_json(times))


def verdict_of(times: Mapping[str, Any]) -> str:
    """What these times mean for speculation, in a sentence or two."""
    ratio = times["t_target_s"][0] / times["t_draft_s"]
    sentence = f"On this machine a target forward costs {ratio:.1f} draft forwards"
    if times["stops"]:
        kind, (seconds, _) = max(times["stops"].items(), key=lambda entry: entry[1][0])
        sentence += f", and the most expensive stop, {kind}, adds {seconds / times['t_draft_s']:.0%} to a draft step"
    cheap = f" Below about {_WORTHWHILE} a saved verification is cheap: expect little of any policy."
    return f"{sentence}.{cheap if ratio < _WORTHWHILE else ''}"
