"""`evaluation evaluate --clock`: clocked generations beside what the times predict of the same prompts (law 4.9).

Every family decodes at the setting that dev chose, in real generations that the trace is played to
(`evaluation.traces.sampler`), and so does the target alone. The oracle and the perfect head are left out: they know
what no loop knows.

Each turn visits every prompt, and on it every runner, in an order that rotates. Both models hold the prompt before the
clock starts (law 4.5: after `prime(prompt)` the cache holds prompt[:-1], a prefix of committed[:-1], and `reset`
returns to that); beside a feature draft the first round reads the prompt, for every policy alike. The first turn is not
timed: it compiles whatever the others will need, since those feed the very same tokens, and holds every generation
against its replay. Signals were recorded many positions at once and are read one by one, so their last bits may differ,
and a threshold may fall between: such a prompt is left out for everyone.

    difference            clocked tokens/s over predicted ones - 1
    draft, verify, rest   clocked less predicted seconds of drafts, of verifications, and between rounds (where nothing
                          is predicted), over all predicted seconds
    common                median difference of all families: the machine's speed now against that when it was timed
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from decode.loop.decoder import Generation
from decode.policies import FixedLength
from evaluation.competitor import Competitor
from evaluation.contest import Contest, Result, replay_arms, result_of
from evaluation.costs.measure import Loop
from evaluation.families import ALONE, BASELINE, REPLAYED, family
from evaluation.gain import MIN_PROMPTS, Splits, Throughput, gain_over
from evaluation.played import Played
from evaluation.table import Table, shown
from evaluation.times import Times
from evaluation.traces.sampler import PlayedSampler
from evaluation.traces.trace import Array, Trace
from evaluation.turns import in_turns
from lm import CachedModel
from store.progress import Bar

TOLERANCE = 0.03
"""A difference beyond this is pointed out."""
_PARTS = {"draft": "drafting", "verify": "verification", "rest": "the rest"}
_GAINS = ("predicted_gain", "clocked_gain")
_COLUMNS = {"policy": ("policy", ""), "setting": ("setting", "")}
_COLUMNS |= {f"{kind} tokens/s": (f"{kind}_tokens_per_s", ".1f") for kind in ("predicted", "clocked")}
_COLUMNS |= {"difference": ("difference", "+.1%")}
_COLUMNS |= {f"of it {words}": (part, "+.1%") for part, words in _PARTS.items()}
_COLUMNS |= {f"{kind} gain": (f"{kind}_gain", "") for kind in ("predicted", "clocked")}
Row = Mapping[str, Any]
"""A family and its setting, predicted and clocked tokens per second, their difference and its parts, the predicted and
the clocked gain over the best fixed length, tokens and clocked seconds by prompt, and clocked over predicted seconds of
drafts and of verifications.
"""
Report = Mapping[str, Any]
"""Of one dataset: `dataset`, `about`, `verdict`, `common` and `rows`."""
_COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted")


class PrimedModel(CachedModel):
    """A `CachedModel` whose `reset` keeps the prompt."""

    _num_primed = 0

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Read all of the prompt but its last token; sequences start from there until the next call."""
        self._num_primed = 0
        self.reset()
        if len(prompt_ids) > 1:
            self.feed(prompt_ids[:-1])
        self._num_primed = len(prompt_ids) - 1

    def reset(self, num_tokens: int = 0) -> None:
        """Go back to the end of the prompt."""
        if self._num_primed:
            self.roll_back(self._num_primed)
        else:
            super().reset(num_tokens)

    def forget(self, length: int) -> None:
        """Keep the copies that a return to the end of the prompt needs."""
        super().forget(min(length, self._num_primed or length))


class PrimedLoop(Loop):
    """The loop of a config for several policies that take turns on one prompt."""

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Set the text that every decoder starts from next."""
        for model in (self.models.target, *self.models.drafts.values()):
            if isinstance(model, PrimedModel) and model.recorder is None:
                model.prime(prompt_ids)

    @cached_property
    def models(self) -> PairModels:
        return PairModels(self.pair, model_class=PrimedModel)


def verdict_of(rows: Sequence[Row], common: float) -> str:
    """The families that differ by more than `TOLERANCE`, and the part of a round that they differ in; `common`: the
    median difference.
    """
    listed = []
    for row in rows:
        if abs(row["difference"]) > TOLERANCE:
            parts = {words: abs(row[part]) for part, words in _PARTS.items()}
            most = max(parts, key=parts.__getitem__)
            listed.append(f"{family(row['family']).label} {row['difference']:+.1%}, most of it {most}")
    if not listed:
        return f"every family is within {TOLERANCE:.0%} of its prediction"
    return f"beyond {TOLERANCE:.0%} of the prediction: {', '.join(listed)}; {common:+.1%} is the median of all families"


def clock_table(report: Report) -> Table:
    """A row for each family."""
    rows = [
        row | {name: row[name].text for name in _GAINS} | {"policy": family(row["family"]).label}
        for row in report["rows"]
    ]
    note = (
        f"{report['verdict']}; gains over the best fixed length, with 95 % paired bootstrap intervals over prompts "
        f"(from {MIN_PROMPTS} on)"
    )
    return Table(f"{report['dataset']} on a clock: {report['about']}", shown(rows, _COLUMNS), note, names=2)


def check_clock(num_prompts: int, repeats: int, *, as_recorded: bool = False) -> None:
    """Raise ValueError unless a clock can run so often; on a record, which may have no prompts, it cannot at all."""
    if num_prompts > 0 and as_recorded:
        raise ValueError("--clock decodes, and decode.as_recorded has neither models nor prompts; give one of the two")
    if num_prompts < 0:
        raise ValueError(f"clock is {num_prompts}; it is a number of test prompts, 0 for none")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; every generation is timed at least once")


def clock_dataset(experiment: Experiment, contest: Contest, test: Trace, *, num_prompts: int, repeats: int) -> Report:
    """The first test prompts of one dataset, every turn of each once, on the loop of the config."""
    loop, rows, times = PrimedLoop.of(experiment, ends_at_eos=True), rows_of(test, num_prompts), contest.times
    alone = next(replay_arms([Competitor(ALONE, ALONE, FixedLength(0), ({},))], Splits(test, test)))
    runners = [result_of(alone, 0, times)]
    runners += [result for name, result in contest.results.items() if name not in REPLAYED]
    clocked = clock(loop, runners, test.select(rows), rows, repeats=repeats, name=contest.dataset)
    return report_of(*clocked, runners, times, dataset=contest.dataset, rows=rows)


def rows_of(trace: Trace, num_prompts: int) -> list[int]:
    """Rows of the first prompts, each turn with its first draw."""
    firsts = {(row.dataset, row.id): number for number, row in reversed([*enumerate(trace.rows)])}
    return sorted(number for number in firsts.values() if trace.prompt_of_row[number] < num_prompts)


def clock(
    loop: PrimedLoop, runners: Sequence[Result], trace: Trace, rows: Sequence[int], *, repeats: int, name: str
) -> tuple[Float[Array, "runner repeat row part"], Bool[Array, " row"]]:
    """Play the whole trace to every runner, once untimed and then `repeats` times; `rows`: numbers of its rows on the
    runners' test split.

    Returns:
        Seconds of each generation, of its drafts and of its verifications; and the rows on which every runner did what
        its replay says.
    """
    num = len(trace.rows)
    seconds, agrees = np.zeros((len(runners), repeats, num, 3)), np.ones(num, dtype=bool)
    with Bar(total=(repeats + 1) * num * len(runners), desc=f"clock: {name}", unit="generations") as bar:
        decoders = [loop.decoder(runner.policy) for runner in runners]
        replays = [played_on(runner, rows) for runner in runners]
        for turn in range(repeats + 1):
            for row, order in in_turns(range(len(runners)), range(num), first=turn):
                request = trace.rows[row]
                loop.prime(request.prompt_ids)
                for number in order:
                    draws, started_s = PlayedSampler(trace, row), perf_counter()
                    generation = decoders[number].generate(request.prompt_ids, request.limit, generator=draws)
                    wall_s, rounds = perf_counter() - started_s, generation.rounds
                    if turn:
                        parts_s = (sum(round_.draft_s for round_ in rounds), sum(round_.target_s for round_ in rounds))
                        seconds[number, turn - 1, row] = (wall_s, *parts_s)
                    elif not _agrees(generation, replays[number], row):
                        agrees[row] = False
                    bar.update()
    return seconds, agrees


def played_on(result: Result, rows: Sequence[int]) -> Played:
    """What a result did on some test rows."""
    assert result.played is not None
    return result.played.select([0], rows)


def _agrees(generation: Generation, replayed: Played, row: int) -> bool:
    """Whether a generation is its replay, draft lengths included; a draft that is read at its end alone may pay more
    forwards.
    """
    drafted = [len(round_.drafted) for round_ in generation.rounds]
    lengths = np.bincount(drafted, minlength=replayed.lengths.shape[-1])
    counts = all(getattr(generation.counts, name) == getattr(replayed.counts, name)[0, row] for name in _COUNTED)
    return counts and np.array_equal(lengths, replayed.lengths[0, row])


def report_of(
    seconds: Float[Array, "runner repeat row part"],
    agrees: Bool[Array, " row"],
    runners: Sequence[Result],
    times: Times,
    *,
    dataset: str,
    rows: Sequence[int],
) -> Report:
    """Every runner, the best fixed length among them, over the rows that all of them decoded as replayed; rows of one
    prompt, such as the turns of a conversation, count together. `seconds`, `agrees`, `rows`: as of `clock`.

    Raises:
        ValueError: there is no such row.
    """
    if not agrees.any():
        raise ValueError(f"{dataset}: no response is decoded as it was replayed; record the trace again with this pair")
    agreeing, timed = np.asarray(rows)[agrees].tolist(), seconds[:, :, agrees]
    predicted, clocked, parts = dict[str, Throughput](), dict[str, Throughput](), dict[str, dict[str, Any]]()
    for number, runner in enumerate(runners):
        played, name = played_on(runner, agreeing), runner.family
        wall_s = np.median(timed[number, ..., 0], axis=0)
        predicted[name] = times.throughput(played).at(0)
        clocked[name] = Throughput(predicted[name].tokens, played.per_prompt(wall_s[None])[0])
        parts[name] = _parts(wall_s.sum(), timed[number].sum((0, 1)), played, times)
    results = [
        {
            "family": runner.family,
            "setting": runner.label,
            "predicted_tokens_per_s": predicted[runner.family].tokens_per_s,
            "clocked_tokens_per_s": clocked[runner.family].tokens_per_s,
            "difference": clocked[runner.family].tokens_per_s / predicted[runner.family].tokens_per_s - 1,
            **parts[runner.family],
            "predicted_gain": gain_over(predicted[BASELINE], predicted[runner.family]),
            "clocked_gain": gain_over(clocked[BASELINE], clocked[runner.family]),
            "tokens": clocked[runner.family].tokens.tolist(),
            "seconds": clocked[runner.family].seconds.tolist(),
        }
        for runner in runners
    ]
    facts = {"dataset": dataset, "about": _about(len(clocked[BASELINE].tokens), agrees, num_repeats=seconds.shape[1])}
    common = float(np.median([row["difference"] for row in results]))
    return facts | {"verdict": verdict_of(results, common), "common": common, "rows": results}


def _about(num_prompts: int, agrees: Bool[Array, " row"], *, num_repeats: int) -> str:
    num_rows, num_left_out = int(agrees.sum()), int((~agrees).sum())
    responses = f"{num_rows} responses to " * (num_prompts < num_rows)
    about = f"{responses}{num_prompts} test prompts, medians of {num_repeats} generations each, prompts read beforehand"
    left_out = f"; {num_left_out} responses left out, where a threshold falls between the last bits of loop and trace"
    return about + left_out * (num_left_out > 0)


def _parts(wall_s: float, totals_s: Array, played: Played, times: Times) -> dict[str, float | None]:
    """Clocked less predicted seconds of each part, over all predicted seconds; each part has its share of `wall_s`. And
    clocked over predicted seconds of drafts, None without any, and of verifications.
    """
    total_s, lengths = float(times.time_s(played).sum()), played.lengths[0].sum(0)
    verify_s = float(lengths @ times.target_s(np.arange(len(lengths))))
    draft, verify = wall_s * totals_s[1:] / totals_s[0]
    seconds = (draft - (total_s - verify_s), verify - verify_s, wall_s - draft - verify)
    draft_pace = float(draft / (total_s - verify_s)) if played.counts.num_drafted.sum() else None
    paces = {"draft_pace": draft_pace, "verify_pace": float(verify / verify_s)}
    return {part: float(part_s / total_s) for part, part_s in zip(_PARTS, seconds, strict=True)} | paces
