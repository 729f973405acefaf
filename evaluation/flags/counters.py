"""The best fixed number of drafted tokens from an engine's own counters, for any kind of draft: no model, no trace.

An engine that drafts K tokens counts how often verification accepts all of the first j: S_1 … S_K. Another k changes
where rounds begin, and so S itself. The estimate assumes that a token's acceptance depends only on how many tokens in a
row were accepted before it in the text: c_a after a tokens. A round of k then leads from one such run to the next:

    rejected after j < k tokens        the next round begins after a run of 0
    all k accepted                     one more token, which no draft proposed, would be accepted with c_{a+k}; the next
                                       round begins after a run of a + k + 1, or of 0

The c that give S_1 … S_K at K are found by fixed-point iteration; beyond them the last one holds. The bracket's other
end is the plain sum 1 + S_1 + … + S_k, which assumes that acceptance depends on the position in the draft alone.
docs/results/flags.md measures the error.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq

from configs.paths import local_path
from evaluation.times import Times

Array = np.ndarray
_LONGEST = 16
_LONGEST_RUN = 64
_ITERATIONS = 60
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_REMEDY = (
    "give vLLM's answers with --per-request-spec-decode-metrics, its /metrics, llama.cpp's log (-lv 4), SGLang's log, "
    "or the share of rounds in which all of the first 1, 2, ... tokens are accepted, such as 0.84,0.60,0.39"
)


def read_counters(source: str) -> list[Array]:
    """S_1 … S_K of each counter that --from names, K ascending: files with commas between them, or numbers, with a
    slash between two lists. ValueError for no counters, for two of one K, and for shares that rise or are outside
    [0, 1].
    """
    if re.fullmatch(r"[\d.,/ ]+", source):
        lists = [[float(number) for number in part.split(",")] for part in source.split("/")]
    else:
        paths = [local_path(part, "--from") for part in source.split(",")]
        lists = [_survival_in(path.read_text(encoding="utf-8", errors="replace"), path) for path in paths]
    for shares in lists:
        if not shares or not all(1 >= a >= b >= 0 for a, b in zip([1.0, *shares], shares, strict=False)):
            raise ValueError(f"--from is {source}: {shares} are not falling shares between 1 and 0; {_REMEDY}")
    numbers = [len(shares) for shares in lists]
    if repeated := [number for number in numbers if numbers.count(number) > 1]:
        raise ValueError(
            f"--from is {source}: {numbers.count(repeated[0])} counters are of {repeated[0]} drafted tokens; give one "
            "counter for each number"
        )
    return sorted((np.array(shares) for shares in lists), key=len)


def _survival_in(text: str, path: Path) -> list[float]:
    accepted: Counter[int] = Counter()
    for at, count in re.findall(rf'{_PER_POSITION}\{{.*?position="(\d+)".*?\}} ([\d.e+]+)', text):
        accepted[int(at)] += float(count)  # type: ignore[assignment]
    if rounds := sum(map(float, re.findall(r"spec_decode_num_drafts_total\{.*?\} ([\d.e+]+)", text))):
        return [accepted[at] / rounds for at in sorted(accepted)]
    if rates := re.findall(r"draft-[\w-]+:.*#acc rate/pos = \(([\d., ]+)\)", text):
        return [float(rate) for rate in rates[-1].split(",")]
    lengths = [float(length) for length in re.findall(r"Decode batch.*accept len: ([\d.]+)", text)]
    if lengths and (steps := re.search(r"speculative_num_steps=(\d+)", text)):
        powers = np.arange(int(steps[1]) + 1)
        mean = min(sum(lengths) / len(lengths), int(steps[1]) + 1.0)
        # falling shares r, r^2, ... that add up to the mean length, with the token that no draft proposed
        rate = float(brentq(lambda rate: (rate**powers).sum() - mean, 0.0, 1.0))
        return (rate ** powers[1:]).tolist()  # type: ignore[no-any-return]
    # (accepted, drafted) of every verification in answers of vLLM
    lists = (_lists(f"per_step_{name}", text) for name in ("accepted", "drafted"))
    steps_of = list(zip(*(chain(*every) for every in lists), strict=True)) or [
        (number, len(counts) - 1)
        for counts in _lists("acceptance_histogram", text)
        for number, count in enumerate(counts)
        for _ in range(count)
    ]
    if not steps_of:
        raise ValueError(f"{path} has no counters of speculation; {_REMEDY}")
    a, drafted = np.array(steps_of).T
    positions = range(1, int(drafted.max()) + 1)
    # of the drafts that have a j-th token and whose tokens before it were accepted
    rates = [(a >= j).sum() / max(((a >= j - 1) & (drafted >= j)).sum(), 1) for j in positions]
    return np.cumprod(rates).tolist()


def _lists(name: str, text: str) -> list[list[int]]:
    return [json.loads(f"[{numbers}]") for numbers in re.findall(rf'"{name}": *\[([\d,\s]*)\]', text)]


def tokens_per_round(survival: Float[Array, " draft"], longest: int) -> tuple[Array, Array]:
    """Mean tokens of a round that drafts 0, 1, … longest tokens: the estimate, and the plain sum."""
    observed = _rates(survival)
    rates = observed.clip(1e-4, 1 - 1e-4)
    for _ in range(_ITERATIONS):
        modelled = _rates(_survival_at(rates, len(survival)))
        rates = (rates * observed / np.maximum(modelled, 1e-9)).clip(1e-4, 1 - 1e-4)
    plain = np.append(observed, np.repeat(observed[-1], longest))[:longest].cumprod()
    estimate = [1 + _survival_at(rates, k).sum() for k in range(longest + 1)]
    return np.array(estimate), 1 + np.append(0.0, plain.cumsum())


def _rates(survival: Float[Array, " draft"]) -> Float[Array, " draft"]:
    before = np.append(1.0, survival[:-1])
    return np.divide(survival, before, out=np.zeros_like(before), where=before > 0)


def _survival_at(rates: Float[Array, " run"], k: int) -> Float[Array, " draft"]:
    """S_1 … S_k of rounds of k tokens, over the runs after which rounds begin."""
    rates = np.append(rates, np.repeat(rates[-1], _LONGEST_RUN))[:_LONGEST_RUN]
    runs = np.minimum(np.arange(_LONGEST_RUN)[:, None] + np.arange(k + 1), _LONGEST_RUN - 1)
    products = rates[runs].cumprod(1)
    moves = np.zeros((_LONGEST_RUN, _LONGEST_RUN))
    moves[np.arange(_LONGEST_RUN), np.minimum(runs[:, -1] + 1, _LONGEST_RUN - 1)] = products[:, -1]
    moves[:, 0] += 1 - products[:, -1]
    # the stationary distribution of the runs: begins = begins @ moves, adding up to 1
    system = np.vstack([(moves.T - np.eye(_LONGEST_RUN))[1:], np.ones(_LONGEST_RUN)])
    begins = np.linalg.solve(system, np.append(np.zeros(_LONGEST_RUN - 1), 1.0))
    return begins @ products[:, :k]  # type: ignore[no-any-return]


def speeds(counters: Sequence[Array], times: Times, size: int, *, is_block: bool = False) -> Float[Array, "3 k"]:
    """Tokens per second by number of drafted tokens, from 0 to 16 or twice those counted: the estimate, and its bracket
    of both assumptions at each counter S_1 … S_K; between two K the estimate goes from one to the other. `size`:
    sequences in the batch; `is_block`: a draft is one forward, however many tokens it has.
    """
    numbers = [len(survival) for survival in counters]
    k = np.arange(max(_LONGEST, 2 * numbers[-1]) + 1)
    both = np.array([tokens_per_round(survival, int(k[-1])) for survival in counters])
    tokens = np.array([np.interp(at, numbers, both[:, 0, at]) for at in k])
    bounds = both.reshape(-1, len(k))
    forwards = np.minimum(k, 1) if is_block else k
    round_s = forwards * times.draft(size) + times.target(size * (1 + k))
    return np.stack([tokens, bounds.min(0), bounds.max(0)]) * size / round_s
