"""python -m evaluation costs: the times of this machine, three ways side by side, and what stops add.

*In the loop* are first quartiles over rounds of real generations, with everything that a draft step and a verification
do: what evaluations use. *By regression* over the same generations, with its R² (SpecDec++, arXiv 2405.19715, Table 2).
*Standalone* are bare forwards, measured at each call. Below, what each kind of stop adds to a draft step (law 4.9),
which evaluations charge.
"""

from collections.abc import Mapping
from json import dumps as to_json
from typing import Any

from configs.schema import Config
from decode.experiment import Experiment
from evaluation.costs.machine import kept_costs, loop_of, times_of
from evaluation.costs.measure import time_forwards
from evaluation.costs.stops import policies_by_kind
from evaluation.table import Table, printing, say
from evaluation.times import Times

_SHOWN = (0, 1, 2, 5, 10, 20)
"""k of t_target(k) in the table."""
_WORTHWHILE = 3
"""Draft forwards that a target forward must cost for stops to be worth much."""


def costs(config: Config, *, again: bool = False, json: bool = False) -> None:
    """Forward times of this machine: in the loop, by regression with R², standalone; and what each kind of stop adds.

    Args:
        config: the experiment; decode.t_draft_s and decode.t_target_s are ignored.
        again: measure once more, and replace the times in DIR/costs.jsonl that evaluations use.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    experiment = Experiment(config)
    times = times_of(experiment, policies_by_kind(experiment.heads.values()), again=again)
    loop = loop_of(experiment)
    bare = None  # a feature draft has no forward without its target
    if not experiment.has_feature_draft:
        bare = time_forwards(loop.pair, loop.prompts[0], max_draft_length=loop.max_draft_length, repeats=5)
    with printing(aside=json):
        time_sheet(times, bare).print()
        stop_sheet(times).print()
        print(f"kept in {kept_costs(experiment.directory).path}, where evaluate and tune find them")
        say(verdict_of(times))
        print("next: acceptance-heads evaluate --config …")
    if json:
        of_bare = {} if bare is None else {"standalone": {"t_draft_s": bare.t_draft_s, "t_target_s": bare.t_target_s}}
        print(to_json(times | of_bare))


def time_sheet(times: Mapping[str, Any], bare: Times | None) -> Table:
    """Times in ms, one row per way of measuring."""
    lengths = [k for k in _SHOWN if k < len(times["t_target_s"])]
    ways = {"in the loop": (times["t_draft_s"], times["t_target_s"])}
    ways |= {"standalone": (bare.t_draft_s, bare.t_target_s)} if bare else {}
    rows = [
        {"": name, "t_draft": _ms(draft_s), **{f"t_target({k})": _ms(target_s[k]) for k in lengths}, "R²": ""}
        for name, (draft_s, target_s) in ways.items()
    ]
    fit = times["fit"]
    rows.append(
        {
            "": "by regression",
            "t_draft": _ms(fit["t_draft_s"]),
            "t_target(0)": _ms(fit["t_target_s"]),
            "R²": f"{fit['r2']:.4f}",
        }
    )
    return Table("milliseconds per forward; evaluations use those of the loop", rows)


def stop_sheet(times: Mapping[str, Any]) -> Table:
    """Seconds that each kind of stop adds to a draft step, the dearest last."""
    step_s = times["t_draft_s"]
    rows = [
        {
            "stop": kind,
            "us": f"{1e6 * seconds:.1f}",
            "± us": f"{1e6 * error_s:.1f}",
            "% of a draft step": f"{100 * seconds / step_s:.1f}",
        }
        for kind, (seconds, error_s) in sorted(times["stops"].items(), key=lambda entry: entry[1][0])
    ]
    return Table(f"what a stop adds to a draft step of {1e6 * step_s:.0f} us", rows)


def verdict_of(times: Mapping[str, Any]) -> str:
    """What these times mean for speculation, in a sentence or two."""
    ratio = times["t_target_s"][0] / times["t_draft_s"]
    sentence = f"On this machine a target forward costs {ratio:.1f} draft forwards"
    if times["stops"]:
        kind, (seconds, _) = max(times["stops"].items(), key=lambda entry: entry[1][0])
        sentence += f", and the dearest stop, {kind}, adds {seconds / times['t_draft_s']:.0%} to a draft step"
    cheap = f" Below about {_WORTHWHILE} a saved verification is cheap: expect little of any policy." * (
        ratio < _WORTHWHILE
    )
    return f"{sentence}.{cheap}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
