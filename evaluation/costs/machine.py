"""`acceptance-heads costs`: the times of this machine in the real loop, and what each kind of stop adds (law 4.9).

t_draft and t_target(k) are medians over rounds of real generations, with everything that a draft step and a
verification do. They are measured once and kept in DIR/costs.jsonl, so that a second evaluation agrees with the first:
one entry per loop, which is everything that `key_of` names. What an entry lacks (stops of heads that were trained
since) is measured and added, as a share of the draft step of its own cycle. Times with large errors are not kept
(`evaluation.costs.stability`). DIR/batch_costs.jsonl keeps the curves of law 4.13 that `bench --batch` measured.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from configs.hints import say_next
from configs.load import accepts_yaml
from configs.schema import Config, DecodeConfig
from decode.experiment import Experiment
from decode.policies.base import Policy
from decode.policies.batch import BatchCosts, Curve
from evaluation.costs import measure, stops
from evaluation.costs.measure import Loop, costs_of, time_rounds
from evaluation.costs.stability import SKIP, stable
from evaluation.costs.stops import Stop, policies_by_kind, shares_of, time_stops
from evaluation.keys import machine_key, models_key, prompts_key
from evaluation.table import Table, printing, say
from evaluation.times import RECORDED, TimeErrors, Times, check_ratio, curve_of
from store.json_files import KeyedStore

_NUM_PROMPTS = 4
TIMING_S = measure.BUDGET_S + stops.BUDGET_S
"""Seconds that the timing of a machine takes unless its models are large."""
ABOUT_TIMING = f"about {round(TIMING_S)} s on a small pair"
_TOKENS = 96
_SHOWN = (0, 1, 2, 5, 10, 20)
"""k of t_target(k) in the table."""
_WORTHWHILE = 3
"""Draft forwards that a target forward must cost for stops to be worth much."""
_MEASURED = ("t_draft_s", "t_target_s", "origin", "errors")


@accepts_yaml
def costs(config: Config, *, again: bool = False, json: bool = False) -> None:
    """Run `acceptance-heads costs`; `configs.measuring` documents its flags."""
    experiment = Experiment(config)
    times = times_of(experiment, policies_by_kind(experiment.heads.values()), again=again)
    step_s = times["t_draft_s"]
    target_s = times["t_target_s"]
    errors = times["errors"]
    seconds = {"t_draft": (step_s, errors["drafting"])}
    for k in _SHOWN:
        if k < len(target_s):
            seconds[f"t_target({k})"] = target_s[k], errors["verifying"][k]
    rows = [
        {"stop": kind, "us": f"{1e6 * share * step_s:.1f}", "± us": f"{1e6 * error * step_s:.1f}"}
        | {"% of a draft step": f"{100 * share:.1f}"}
        for kind, (share, error) in sorted(times["stop_shares"].items(), key=lambda entry: entry[1][0])
    ]
    with printing(json) as publish:
        forwards = {name: f"{1e3 * value:.3f} ± {error:.1%}" for name, (value, error) in seconds.items()}
        Table("milliseconds per forward in the loop", [forwards], names=0).print()
        Table(f"what a stop adds to a draft step of {1e6 * step_s:.0f} us", rows).print()
        print(f"kept in {kept_costs(experiment.directory).path}, where evaluate and tune find them")
        say(verdict_of(times))
        say_next(config, "evaluate")
        publish(times)


def verdict_of(times: Mapping[str, Any]) -> str:
    """What these times mean for speculation, in a sentence or two."""
    ratio = times["t_target_s"][0] / times["t_draft_s"]
    sentence = f"On this machine a target forward costs {ratio:.1f} draft forwards"
    if times["stop_shares"]:
        kind, (share, _) = max(times["stop_shares"].items(), key=lambda entry: entry[1][0])
        sentence += f", and the most expensive stop, {kind}, adds {share:.0%} to a draft step"
    cheap = f" Below about {_WORTHWHILE} a saved verification is cheap: expect little of any policy."
    return f"{sentence}.{cheap if ratio < _WORTHWHILE else ''}"


def costs_for(experiment: Experiment, ratio: float | None = None, *, policies: Sequence[Policy] | None = None) -> Times:
    """Times that the YAML gives (ValueError for one of the two alone), or else those of this machine; with what the
    stops of all its policies cost.

    Args:
        experiment: the models, policies and settings.
        ratio: t_target / t_draft of other hardware, instead of that of these times; ValueError unless positive.
        policies: the stops of these alone count, and nothing is measured: where no times are known, a second is a
            target forward, at this ratio or the first of decode.ratios; ValueError where neither is given.
    """
    decode = experiment.decode
    store = kept_costs(experiment.directory)
    target = _given_target(decode)
    if ratio is not None:
        check_ratio(ratio)
    every = policies_by_kind(experiment.heads.values()) if policies is None else policies_by_kind((), policies)
    if decode.t_draft_s is not None and target is not None:
        shares = shares_of(experiment, every, {})
        times = Times.with_shares(Curve.line(decode.t_draft_s), target, "given", shares)
    elif policies is None and not decode.as_recorded:
        times = _times_from(times_of(experiment, every), experiment, every)
    elif (
        entry := recorded_times(store, experiment) if decode.as_recorded else store.get(key_of(experiment))
    ) is not None:
        times = _times_from(entry | ({"origin": RECORDED} if decode.as_recorded else {}), experiment, every)
    elif policies is None or (ratio is None and not decode.ratios):
        raise ValueError(
            f"{store.path} has no times of this loop; run `acceptance-heads costs`, or give "
            f"{'' if policies is None else '--ratio 5, or '}decode.t_draft_s and decode.t_target_s"
        )
    else:
        first = decode.ratios[0] if ratio is None else ratio
        origin = f"ratio {first:g}, nothing measured: a second is a target forward"
        return Times.with_shares(Curve.line(1 / first), Curve.line(1.0), origin, shares_of(experiment, every, {}))
    return times if ratio is None else times.with_ratio(ratio)


def _given_target(decode: DecodeConfig) -> Curve | None:
    """The target's seconds by tokens that the YAML gives; None where it gives no times. ValueError for a part of them,
    or for two.
    """
    number_s = decode.t_target_s
    by_tokens = decode.t_target_ms
    if number_s is not None and by_tokens is not None:
        raise ValueError(
            f"decode.t_target_s is {number_s} and decode.t_target_ms is {by_tokens}: both say what a target forward "
            "takes; give one of them"
        )
    if (decode.t_draft_s is None) != (number_s is None and by_tokens is None):
        raise ValueError(
            "decode.t_draft_s and decode.t_target_s (or decode.t_target_ms) go together: give both, or neither to "
            "measure them"
        )
    if by_tokens is not None:
        return curve_of("decode.t_target_ms", by_tokens)
    return None if number_s is None else Curve.line(number_s)


def _times_from(entry: Mapping[str, Any], experiment: Experiment, policies: Mapping[str, Policy]) -> Times:
    """The times of an entry; a stop that was not timed has its share by size."""
    step_s = entry["t_draft_s"]
    measured = _stop_shares(entry)
    stop_s = {kind: share * step_s for kind, (share, _) in measured.items()}
    shares = shares_of(experiment, policies, {kind: share for kind, (share, _) in measured.items()})
    origin = "stops measured"
    if untimed := {kind: shares.of.get(kind, 0.0) * step_s for kind in policies if kind not in stop_s}:
        stop_s |= untimed
        origin = f"this stop not timed: {shares.origin}"
    errors = errors_of(entry)._replace(stopping={kind: error for kind, (_, error) in measured.items()})
    target_s = tuple(entry["t_target_s"])
    target = Curve(tuple(range(1, len(target_s) + 1)), target_s)
    return Times(Curve.line(step_s), target, entry["origin"], stop_s, origin, shares, errors)


def _stop_shares(entry: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Kind of stop -> its share of a draft step and the error of that; entries of earlier versions have seconds."""
    step_s = 1.0
    of_kinds = entry.get("stop_shares")
    if of_kinds is None:
        step_s = entry["t_draft_s"]
        of_kinds = entry.get("stops", {})
    return {kind: (value / step_s, error / step_s) for kind, (value, error) in of_kinds.items()}


def errors_of(entry: Mapping[str, Any]) -> TimeErrors:
    """The errors of an entry without those of stops; entries of earlier versions have one for all k."""
    of_entry = entry["errors"]
    verifying = np.broadcast_to(of_entry.get("verifying", 0.0), len(entry["t_target_s"]))
    return TimeErrors(of_entry.get("drafting", 0.0), tuple(verifying.tolist()))


def times_of(experiment: Experiment, policies: Mapping[str, Policy], *, again: bool = False) -> dict[str, Any]:
    """This loop's entry in DIR/costs.jsonl, with the stops of all these policies, by kind; what is missing, or `again`
    everything, is measured and kept.
    """
    store = kept_costs(experiment.directory)
    key = key_of(experiment)
    entry = None if again else store.get(key)
    missing = {kind: policy for kind, policy in policies.items() if entry is None or kind not in entry["stop_shares"]}
    if entry is None or missing:
        loop = loop_of(experiment)
        print(
            f"costs: timing this machine once, {ABOUT_TIMING}; kept in {store.path}. Other work on the "
            f"machine distorts the times. To skip it, give the times: {SKIP}",
            file=sys.stderr,
            flush=True,
        )
        on_cpu = loop.pair.target.device.type == "cpu"
        if entry is None:
            timed = stable(lambda: costs_of(time_rounds(loop), loop.max_draft_length), largest_errors, on_cpu=on_cpu)
            entry = entry_of(timed)
        stopping = stable(lambda: time_stops(loop, missing), largest_of_stops, on_cpu=on_cpu)
        entry["stop_shares"] |= stopping
        store.keep([(key, entry)])
    return entry


def largest_errors(times: Times) -> dict[str, float]:
    """Time -> its error; of t_target(k) the median over k."""
    errors = times.errors
    return {"t_draft": errors.drafting, "t_target": errors._replace(drafting=0.0, stopping={}).largest}


def largest_of_stops(stops_: Mapping[str, Stop]) -> dict[str, float]:
    """Stop -> its error, in draft steps."""
    return {f"the stop of {kind}, in draft steps,": error for kind, (_, error) in stops_.items()}


def entry_of(times: Times) -> dict[str, Any]:
    """Measured times as DIR/costs.jsonl keeps them, without those of stops."""
    return {
        "t_draft_s": times.t_draft_s,
        "t_target_s": list(times.target.seconds),
        "origin": times.origin,
        "errors": {"drafting": times.errors.drafting, "verifying": list(times.errors.verifying)},
        "stop_shares": {},
    }


def loop_of(experiment: Experiment) -> Loop:
    """The loop that the config describes, on a few dev prompts of the first dataset."""
    prompts = experiment.prompt_ids(next(iter(experiment.datasets)), "dev", num=_num_read(experiment))[:_NUM_PROMPTS]
    return Loop.of(experiment, prompts=prompts, max_new_tokens=min(experiment.decode.max_new_tokens, _TOKENS))


def key_of(experiment: Experiment) -> dict[str, object]:
    """Everything that the times of a loop depend on. Of the prompts, the first ones, which are those that are timed
    unless they are too long.
    """
    dataset = next(iter(experiment.datasets))
    prompts = experiment.prompts(dataset, "dev", num=_num_read(experiment))[:_NUM_PROMPTS]
    max_new_tokens = min(experiment.decode.max_new_tokens, _TOKENS)
    return loop_key(experiment) | {"prompts": prompts_key(experiment, prompts), "max_new_tokens": max_new_tokens}


def loop_key(experiment: Experiment) -> dict[str, object]:
    """The models, the sampling, the longest draft and the machine of a loop, whatever it is timed on."""
    return models_key(experiment, "target", "draft") | _drafting(experiment) | machine_key(experiment)


def recorded_times(store: KeyedStore, experiment: Experiment) -> dict[str, Any] | None:
    """The last entry of the trace's sampling and longest draft, wherever its models lay."""
    drafting = _drafting(experiment)
    return next((value for key, value in store.entries()[::-1] if drafting.items() <= key.items()), None)


def _drafting(experiment: Experiment) -> dict[str, object]:
    return {"sampling": experiment.sampling.as_dict(), "max_draft_length": experiment.decode.max_draft_length}


def _num_read(experiment: Experiment) -> int:
    """Dev prompts that the timed ones are taken from: some may be too long."""
    return max(experiment.decode.num_dev, 1)


def kept_costs(directory: Path) -> KeyedStore:
    """The times of every loop that was timed for this directory."""
    return KeyedStore(
        directory / "costs.jsonl", remedy="delete the line, and the times are measured again", fields=_MEASURED
    )


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
    return KeyedStore(
        experiment.directory / "batch_costs.jsonl",
        remedy="delete the line, and measure again with `evaluation bench --batch`",
        fields=BatchCosts._fields,
    )
