"""The source that decodes on a clock: arms take turns on the same prompts, and what each did is `Played`, with seconds.

The seconds of a generation are wall clock around the whole of it, from the call until its last token: drafts,
verifications and what lies between rounds. They include reading the prompt, unless the models hold it already, as in
`evaluate --clock`. The first token is there when the first round ends. Other seconds have other names: `drafting` and
`verifying` are sums over rounds, without what lies between them, and times of forwards are fitted to those.

All arms run on a prompt one right after the other, so a slow moment of the machine slows all of them, and a prompt is
stored as soon as every arm has had its turns. An interrupted run decodes only the prompts that lack an arm; these are
decoded again by all arms, so that their seconds are of one moment.

What is shorter than a generation is timed elsewhere, in turns and within a budget too (`evaluation.turns`): the loop
itself times rounds, which `evaluation.costs.measure` reads, and `evaluation.costs.stops` times draft steps.

    key    run (a digest of what decides tokens and seconds), prompt, arm
    value  `Clocked`: counts and seconds; of several repeats, from the same seed, the medians of the seconds
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import fsum
from operator import attrgetter
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from decode.loop.counts import Counts
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.rounds import Generation, Round
from evaluation.played import Array, Played
from evaluation.turns import in_turns, turns_within
from lm import RandomSampler, Sampler
from store.json_files import KeyedStore
from store.progress import Bar

AnyPrompt = TypeVar("AnyPrompt")
_SECONDS = ("whole_s", "first_token_s", "drafting_s", "verifying_s")


@dataclass(frozen=True, kw_only=True)
class Clocked:
    """One generation on a clock, or its medians over repeats from the same seed."""

    counts: Counts
    lengths: tuple[int, ...] = ()
    """Rounds by the number of tokens drafted, from 0 on; empty where rounds are unknown."""
    whole_s: float
    """Wall clock around the generation."""
    first_token_s: float
    """Wall clock until the end of the first round."""
    drafting_s: float = 0.0
    verifying_s: float = 0.0
    later: "Clocked | None" = None
    """The same without the first round, which reads the prompt."""
    repeats: int = 1


def clock_generation(decoder: SpeculativeDecoder, prompt_ids: list[int], limit: int, *, draws: Sampler) -> Clocked:
    """One generation of our loop of at most `limit` tokens."""
    rounds: list[Round] = []
    first_token_s = 0.0
    started_s = perf_counter()
    for round_ in decoder.stream(prompt_ids, limit, generator=draws):
        if not rounds:
            first_token_s = perf_counter() - started_s
        rounds.append(round_)
    return clocked_of(rounds, whole_s=perf_counter() - started_s, first_token_s=first_token_s)


Request = tuple[list[int], int, int]
"""A prompt, the most tokens to write, and a seed."""
Arm = Callable[[Request], Clocked]


def generations_of(decoder: SpeculativeDecoder) -> Arm:
    """Generations of our loop."""

    def decode(request: Request) -> Clocked:
        prompt, limit, seed = request
        return clock_generation(decoder, prompt, limit, draws=RandomSampler(seed))

    return decode


def clocked_of(rounds: Sequence[Round], *, whole_s: float, first_token_s: float) -> Clocked:
    """A generation of these rounds that took `whole_s`, and `first_token_s` until its first token."""
    return replace(_sums_of(rounds, whole_s, first_token_s), later=_sums_of(rounds[1:], whole_s - first_token_s, 0.0))


def _sums_of(rounds: Sequence[Round], whole_s: float, first_token_s: float) -> Clocked:
    lengths = np.bincount([len(round_.drafted) for round_ in rounds], minlength=1)
    return Clocked(
        counts=Generation.of(rounds).counts,
        lengths=tuple(lengths.tolist()),
        whole_s=whole_s,
        first_token_s=first_token_s,
        drafting_s=fsum(round_.draft_s for round_ in rounds),
        verifying_s=fsum(round_.target_s for round_ in rounds),
    )


def median_of(repeated: Sequence[Clocked]) -> Clocked:
    """Several generations from the same seed as one, with the medians of their seconds."""
    later = [run.later for run in repeated if run.later is not None]
    medians = {name: median(getattr(run, name) for run in repeated) for name in _SECONDS}
    return replace(repeated[0], **medians, later=median_of(later) if later else None, repeats=len(repeated))


class StoredRuns:
    """The clocked generations of one run: of everything that its digest covers."""

    def __init__(self, store: KeyedStore, run: str) -> None:
        self._store = store
        self._run = run

    def load(self, *, repeats: int = 1) -> dict[str, dict[str, Clocked]]:
        """Prompt -> arm -> its generation, of those that were repeated as often."""
        runs: dict[str, dict[str, Clocked]] = defaultdict(dict)
        for key, value in self._store.entries():
            if key.get("run") == self._run and value["repeats"] >= repeats:
                runs[key["prompt"]][key["arm"]] = _clocked_from(value)
        return dict(runs)

    def keep(self, prompt: str, runs: Mapping[str, Clocked]) -> None:
        """Add what every arm did on a prompt."""
        keys = ({"run": self._run, "prompt": prompt, "arm": arm} for arm in runs)
        self._store.keep(zip(keys, map(asdict, runs.values()), strict=True))


def _clocked_from(value: Mapping[str, Any]) -> Clocked:
    later = value["later"]
    changes = {
        "counts": Counts(**value["counts"]),
        "lengths": tuple(value["lengths"]),
        "later": None if later is None else _clocked_from(later),
    }
    return Clocked(**{**value, **changes})


def clock_in_turns(
    arms: Mapping[str, Callable[[AnyPrompt], Clocked]],
    prompts: Mapping[str, AnyPrompt],
    *,
    desc: str,
    store: StoredRuns | None = None,
    repeats: int = 1,
    warm_up: AnyPrompt | None = None,
) -> dict[str, list[Clocked]]:
    """Every arm on every prompt, [arm][prompt].

    Args:
        arms: by name, which identifies stored generations together with the run.
        prompts: by the name that identifies them in the store.
        desc: of the progress bar.
        store: keeps generations, and returns those of an interrupted run.
        repeats: how often each arm decodes a prompt, in turns; the medians of the seconds count.
        warm_up: what each arm decodes once before anything is timed.
    """
    known = store.load(repeats=repeats) if store else {}
    runs = {name: known.get(name, {}) for name in prompts}
    missing = [name for name in prompts if not arms.keys() <= runs[name].keys()]
    if missing and warm_up is not None:
        for decode in arms.values():
            decode(warm_up)
    with Bar(desc=desc, total=len(prompts), initial=len(prompts) - len(missing), unit="prompts") as bar:
        for turn, name in enumerate(prompts):
            if name not in missing:
                continue
            repeated = _repeated(arms, prompts[name], repeats, first=turn)
            runs[name] = {arm: median_of(of_arm) for arm, of_arm in repeated.items()}
            if store:
                store.keep(name, runs[name])
            bar.update()
    return {arm: [runs[name][arm] for name in prompts] for arm in arms}


def clock_within(
    budget_s: float,
    arms: Mapping[str, Callable[[AnyPrompt], Clocked]],
    request_of: Callable[[int], AnyPrompt],
    *,
    fewest: int,
    desc: str,
) -> dict[str, list[Clocked]]:
    """Every arm once in every turn, [arm][turn], for as many turns as the seconds suffice for: at least `fewest`. Each
    arm decodes the first request once before anything is timed.

    Args:
        budget_s: seconds for all turns.
        arms: by name.
        request_of: number of a turn -> what all arms decode in it.
        fewest: turns.
        desc: of the progress bar.
    """
    for decode in arms.values():
        decode(request_of(0))
    runs: dict[str, list[Clocked]] = {arm: [] for arm in arms}
    for turn in turns_within(budget_s, fewest, desc=desc, unit="turns"):
        for arm, of_arm in _repeated(arms, request_of(turn), 1, first=turn).items():
            runs[arm] += of_arm
    return runs


def _repeated(
    arms: Mapping[str, Callable[[AnyPrompt], Clocked]], request: AnyPrompt, repeats: int, *, first: int
) -> dict[str, list[Clocked]]:
    """Generations of every arm for one request, in turns that arm number `first` begins."""
    runs: dict[str, list[Clocked]] = {arm: [] for arm in arms}
    for _, order in in_turns(arms, range(repeats), first=first):
        for arm in order:
            runs[arm].append(arms[arm](request))
    return runs


def played_of(
    runs: Sequence[Sequence[Clocked]],
    *,
    stop_kind: str = "",
    micro_stop_kind: str = "",
) -> Played:
    """What several settings did, from their generations [setting][prompt].

    Args:
        stop_kind: `Policy.stop_kind` of what stops the draft.
        micro_stop_kind: that of the level below, in a hierarchy.
    """
    later = [[run.later for run in row if run.later is not None] for row in runs]
    has_later = all(len(some) == len(row) for some, row in zip(later, runs, strict=True))
    kinds = {"stop_kind": stop_kind, "micro_stop_kind": micro_stop_kind}
    return Played(
        counts=Counts(**{f.name: _array(runs, attrgetter(f"counts.{f.name}")) for f in fields(Counts)}),
        lengths=_lengths_of(runs),
        prompt_of_row=np.arange(len(runs[0])),
        seconds={name: _array(runs, attrgetter(name)) for name in _SECONDS},
        later=played_of(later, **kinds) if has_later else None,
        **kinds,
    )


def _array(runs: Sequence[Sequence[Clocked]], value: Callable[[Clocked], float]) -> Array:
    return np.array([[value(run) for run in row] for row in runs])


def _lengths_of(runs: Sequence[Sequence[Clocked]]) -> Array:
    """Rounds by the number of tokens drafted, [setting, row, length]."""
    width = max(len(run.lengths) for row in runs for run in row)
    lengths = np.zeros((len(runs), len(runs[0]), width), dtype=int)
    for number, row in enumerate(runs):
        for at, run in enumerate(row):
            lengths[number, at, : len(run.lengths)] = run.lengths
    return lengths
