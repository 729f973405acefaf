"""The verdict in words and on disk: the console, report.html, verdict.json, a head's model card and `generate` have the
same sentence.

The verdict is that of the training sets at the evaluation's own times: of one training set its contest, of several one
over all their prompts. Transfer sets take no part. Everything is predicted from counts and times (law 4.9).
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.experiment import Experiment
from decode.policies.recommended import VERDICT
from evaluation.clock import COSTS_AGAIN, ClockReport, contradiction
from evaluation.competitor import Arm, values_of
from evaluation.contest import Contest, Replays, Result, hold
from evaluation.families import BASELINE, HEADS, TRAINING_FREE, family
from evaluation.gain import MIN_PROMPTS, MORE_PROMPTS, doubt, prompts_needed, prompts_text
from evaluation.played import joined
from evaluation.report.conclusion import MIN_SHARE_AHEAD, NUM_RESAMPLES, Range, Verdict, conclude
from evaluation.table import say
from evaluation.times import Times
from evaluation.traces.recording import join_splits
from heads.model.files import read_head_config
from heads.model.head import update_config
from store.shards import write_atomic

Record = dict[str, Any]
"""The verdict as verdict.json has it, or a part of it."""
_PROMPT = "Why is the sky blue?"
_NOUNS = {TRAINING_FREE: "rule without training", HEADS: "head"}


def sentence_of(verdict: Verdict) -> str:
    """Which policy to use, and why."""
    if not verdict.is_decided:
        return _too_few(verdict)
    if verdict.undecided_by_times is not None:
        return _times_decide(verdict, verdict.undecided_by_times)
    return f"Use {named(verdict.winner)}: {'; '.join(_reasons(verdict))}."


def sentence_at(contest: Contest) -> str:
    """The verdict of a contest that is not the evaluation's own: of other times, or of another dataset."""
    sentence = sentence_of(conclude(contest))
    where = contest.times.where
    return f"On {contest.dataset}, {where[0].lower()}{where[1:]}: {sentence[0].lower()}{sentence[1:]}"


def _reasons(verdict: Verdict) -> Iterator[str]:
    """What simpler policies the recommended one beats; then why nothing more complex is recommended."""
    groups = list(verdict.candidates)
    simpler = groups[: groups.index(verdict.group)]
    beaten = [group for group in simpler if verdict.beats(verdict.group, group)]
    if beaten:
        leads = [_over(verdict, verdict.group, rival) for rival in beaten]
        yield " and ".join(leads) + _stability(verdict, beaten)
    for group in groups[len(simpler) + 1 :]:
        yield _shortcoming(verdict, group)
    if HEADS not in groups:
        yield "no head takes part (`acceptance-heads train` and `export` make heads)"


def _over(verdict: Verdict, group: str, rival: str) -> str:
    return f"{verdict.gain(group, rival).words} over {named(verdict.candidates[rival])}"


def _lead(verdict: Verdict, group: str, rival: str) -> str:
    names = [named(verdict.candidates[name]) for name in (group, rival)]
    return f"the {verdict.gain(group, rival).words} of {names[0]} over {names[1]}"


def _stability(verdict: Verdict, beaten: list[str]) -> str:
    """In how many repeated splits the recommended policy is ahead of each policy that it beats, at least."""
    if verdict.contest.splits is None:
        return ""
    share = min(verdict.share_ahead(verdict.group, rival) for rival in beaten)
    return f", ahead in {_percent(share)} of the repeated splits"


def _shortcoming(verdict: Verdict, group: str) -> str:
    """Why a candidate is not recommended although it is more complex than the one that is."""
    name = named(verdict.candidates[group])
    gain = verdict.gain(group, verdict.group)
    is_over_fixed = verdict.group != BASELINE and verdict.beats(group, BASELINE)
    if is_over_fixed and not verdict.beats(verdict.group, BASELINE):
        fixed = named(verdict.candidates[BASELINE])
        words = verdict.gain(group, BASELINE).words
        return f"{name} beats {fixed}, {words}, but not this rule by more than noise, {gain.words}"
    if gain.value <= 0:
        return f"no {_NOUNS[group]} is faster, {gain.words} for {name}"
    if not gain.is_above_noise:
        return f"no {_NOUNS[group]} is faster by more than noise, {gain.words} for {name}"
    share = verdict.share_ahead(group, verdict.group)
    if share < MIN_SHARE_AHEAD:
        return f"{name} is faster, {gain.words}, but in only {_percent(share)} of the repeated splits"
    return f"{name} is faster, {gain.words}, but does not beat every simpler policy"


def _too_few(verdict: Verdict) -> str:
    """That there is no verdict, how many prompts one needs, and what to use until then."""
    num_prompts = verdict.contest.num_prompts
    group = list(verdict.candidates)[-1]
    gain = verdict.gain(group, BASELINE)
    needed = prompts_needed(gain, num_prompts)
    remedy = f"a verdict needs at least {MIN_PROMPTS}"
    if group != BASELINE and needed is not None:
        remedy += f", and {prompts_text(needed)} would settle {_lead(verdict, group, BASELINE)}"
    count = "1 test prompt is" if num_prompts == 1 else f"{num_prompts} test prompts are"
    return (
        f"No verdict: {count} too few; {remedy} ({MORE_PROMPTS}). Until then use {named(verdict.winner)}, the "
        "fastest on dev."
    )


def _times_decide(verdict: Verdict, group: str) -> str:
    """That there is no verdict because of the times, and how to measure them again."""
    gain = verdict.gain(group, verdict.group)
    winner = named(verdict.winner)
    rival = named(verdict.candidates[group])
    return (
        f"No verdict: the error of the measured times decides whether {rival} is faster than {winner}, "
        f"{gain.words}. Close other programs and measure again: `{COSTS_AGAIN}`. Until then use {winner}."
    )


def notes_of(verdict: Verdict) -> list[str]:
    """How sure the choice of the setting and of the head is, and what would settle a difference within noise."""
    notes = []
    if verdict.near_best is not None:
        notes.append(f"On dev, {range_text(verdict.near_best)} is within noise of the best setting.")
    if verdict.head_shares:
        (first, share), *others = verdict.head_shares.items()
        note = f"Of {NUM_RESAMPLES} resampled dev sets, {_percent(share)} choose head {first}"
        if others:
            note += f" and {_percent(others[0][1])} choose {others[0][0]}"
        notes.append(f"{note}.")
    if verdict.is_decided:
        notes += _unsettled(verdict)
    return notes


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _unsettled(verdict: Verdict) -> Iterator[str]:
    """What would settle each lead over the recommended policy that is within noise."""
    for group in verdict.candidates:
        gain = verdict.gain(group, verdict.group)
        if gain.value <= 0 or gain.is_above_noise:
            continue
        clause = doubt(gain, verdict.contest.num_prompts, lead=_lead(verdict, group, verdict.group))
        yield f"{clause[0].upper()}{clause[1:]}."


def range_text(near: Range) -> str:
    """A range of settings: max_rejection_prob from 0.62 to 0.81."""
    parameter, values = near
    if len(values) == 1:
        return f"no other {parameter} than {values[0]:.3g}"
    return f"{parameter} from {values[0]:.3g} to {values[-1]:.3g}"


def range_record(near: Range | None) -> Record | None:
    """A range of settings in JSON."""
    if near is None:
        return None
    parameter, values = near
    return {"parameter": parameter, "low": values[0], "high": values[-1], "num_values": len(values)}


def named(result: Result) -> str:
    """A policy with its setting, in a sentence."""
    values = values_of(result.setting)
    if result.family == BASELINE:
        return f"fixed length {values}" if result.setting["k"] else "no draft (fixed length 0)"
    name = f"head {result.competitor.head}" if result.competitor.head else family(result.family).label
    return f"{name} at {values}" if values else name


def spec_of(result: Result, experiment: Experiment) -> str | None:
    """The policy as `--policy` takes it; None for a head that is in no directory, calibrated for a trace alone."""
    name = result.competitor.name
    parts = []
    if result.competitor.head:
        path = experiment.head_paths.get(result.competitor.head)
        if path is None:
            return None
        name = "head"
        parts.append(path)
    for key, value in result.setting.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        parts.append(f"{key}={text}")
    return f"{name}:{','.join(parts)}".removesuffix(":")


def record_of(verdict: Verdict, experiment: Experiment, *, clock: ClockReport | None = None) -> Record:
    """The verdict as verdict.json has it; `clock`: the report that its gains are from, where they are not predicted."""
    contest = verdict.contest
    sentence = sentence_of(verdict)
    used = verdict.winner
    policy = spec_of(used, experiment)
    if policy is None:
        used = verdict.candidates.get(TRAINING_FREE, contest.baseline)
        policy = spec_of(used, experiment)
        sentence += f" It was calibrated on this trace and is in no directory, so `generate` uses {named(used)}."
    gain = contest.gain(used.family)
    over = "as the best fixed length" if used.family == BASELINE else f"{gain.words} over the best fixed length"
    speed = f"predicted {used.tokens_per_s * contest.times.alone_s:.2f}"
    if clock is not None:
        speed = f"on a clock {clock.speed_up(used.family):.2f}"
    return {
        "sentence": sentence,
        "policy": policy,
        "head": experiment.head_paths.get(used.competitor.head),
        "speed": f"{speed} times as fast as the target alone, {over}, {contest.baseline.setting['k']}",
        "gain": gain._asdict(),
        "notes": [*filter(None, [contest.times.caveat]), *notes_of(verdict)],
        "is_decided": verdict.is_decided and verdict.undecided_by_times is None,
        "dataset": contest.dataset,
        "num_prompts": contest.num_prompts,
        "candidates": [_candidate(verdict, group, experiment) for group in verdict.candidates],
        "within_noise": range_record(verdict.near_best),
        "resampled_heads": dict(verdict.head_shares),
        "costs": contest.times.title,
        "of": experiment.identity,
    }


def record_by_the_clock(clock: ClockReport, experiment: Experiment) -> Record:
    """The verdict of clocked gains, where the clock contradicts the predicted ones."""
    record = record_of(conclude(clock.clocked), experiment, clock=clock)
    record["sentence"] += " These gains are clocked, and contradict the predicted ones."
    record["notes"] = [contradiction(clock), *record["notes"]]
    return record


def _candidate(verdict: Verdict, group: str, experiment: Experiment) -> Record:
    result = verdict.candidates[group]
    return {
        "policy": spec_of(result, experiment),
        "name": named(result),
        "gain": verdict.gain(group, BASELINE)._asdict(),
        "beats": [rival for rival in verdict.candidates if verdict.beats(group, rival)],
    }


def verdict_sets(experiment: Experiment) -> list[str]:
    """The datasets of the verdict: the training sets that are evaluated, or else the first dataset."""
    names = list(experiment.datasets)
    return [name for name in names if experiment.is_training_set(name)] or names[:1]


def together(parts: Mapping[str, Replays], times: Times) -> tuple[Contest, Replays]:
    """The contest over the prompts of several datasets, and its replays; the competitors are the same on all."""
    arms = pooled([replays.arms for replays in parts.values()])
    traces = join_splits(replays.traces for replays in parts.values())
    joint = Replays(traces, arms, all(replays.has_token_rule for replays in parts.values()))
    return hold(joint, times, dataset=" + ".join(parts)), joint


def pooled(every: Sequence[Sequence[Arm]]) -> list[Arm]:
    """The arms of several datasets, which have the same competitors, as arms over all their prompts."""
    arms = []
    for members in zip(*every, strict=True):
        dev = joined([arm.dev for arm in members])
        test = joined([arm.test for arm in members])
        arms.append(Arm(members[0].competitor, dev, test))
    return arms


def publish_verdict(record: Record, experiment: Experiment, directory: Path) -> list[Path]:
    """Write verdict.json into a directory, and the sentence into the model cards of the heads; the paths. Heads on the
    hub, and heads that a published record brings along, keep their cards.
    """
    path = directory / VERDICT
    write_atomic(path, json.dumps(record, indent=1, allow_nan=False).encode())
    written = [path]
    heads = {} if experiment.decode.as_recorded else experiment.head_paths
    for head in map(Path, heads.values()):
        if head.is_dir():
            recommended = read_head_config(head / "config.json").get("recommended", {})
            update_config(head, recommended=recommended | {"verdict": record["sentence"]})
            written.append(head / "README.md")
    return written


def tell(record: Record, experiment: Experiment, *, is_written: bool = True) -> None:
    """Print the verdict: how sure it is, how to decode with it, if `generate` can find it, and at last the sentence."""
    if record["notes"]:
        say("\n" + "\n".join(record["notes"]))
    if is_written:
        print(f"next: {generate_command(experiment)}")
    else:
        print("nothing is written; with --write true, generate follows these thresholds and this verdict")
    say(f"\n{record['sentence']}")


def generate_command(experiment: Experiment) -> str:
    """The command that decodes with the verdict's policy. A record's models may be elsewhere, and an experiment that
    was made in Python has a call instead.
    """
    if absent := experiment.absent_models:
        return f"`acceptance-heads generate` on a machine that has {' and '.join(absent)}"
    if not experiment.arguments:
        return "decode.complete(config, prompt) in Python"
    return shlex.join(["acceptance-heads", "generate", *experiment.arguments, "--prompt", _PROMPT])
