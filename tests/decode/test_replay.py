"""Replay has the law of the real loop (law 4.10), exactly: every trace of a pair of toys with its probability, against every branch of the
loop.

A trace of the toys is enumerated here by its definition (a response from p; outcomes min(1, q/p); rejected draws from norm(max(0, q - p));
branches from q), all of them become rows of one trace, and replay's counts, weighted, are compared with those of the loop on a script of
draws.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
import torch
from enumeration import ToyModel, assert_same_law, law_of
from scipy.special import expit
from test_losslessness import POLICIES, PROMPT, SAMPLINGS, decoder_of, toy_head

from decode import Trace, replay
from decode.policies import CumulativeTokenProb, FixedLength, Policy
from decode.policies.base import AfterDraw
from decode.policies.oracle import Oracle
from decode.replay import replay_settings
from decode.trace import TokenInputs, TraceRow
from lm import Draws, Sampling, acceptance_prob, acceptance_rate, entropy, residual_probs

EOS = 2
COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted", "num_draft_forwards")
Draw = tuple[tuple[int, ...], int]
"""A drawn token and the prefix that it was drawn after."""
Variant = tuple[float, tuple[Draw, ...]]
"""Probability and branch of one position's outcome; no branch: accepted."""


class Toys:
    """Every trace of the toys 1 (target) and 2 (draft)."""

    def __init__(self, sampling: Sampling, *, limit: int, length: int, eos_ids: Sequence[int] = (EOS,)) -> None:
        self.sampling, self.limit, self.length, self.eos_ids = sampling, limit, length, frozenset(eos_ids)
        self.models = {"p": ToyModel(1), "q": ToyModel(2)}

    @lru_cache  # noqa: B019
    def row(self, name: str, prefix: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden state after the prompt and `prefix`."""
        model = self.models[name]
        model.reset()
        logits = model.forward([*PROMPT, *prefix])[-1]
        assert model.hidden is not None
        return logits, model.hidden[-1]

    def probs(self, name: str, prefix: tuple[int, ...]) -> torch.Tensor:
        return self.sampling.probs(self.row(name, prefix)[0])

    def responses(self, prefix: tuple[int, ...] = ()) -> Iterator[tuple[float, tuple[int, ...]]]:
        if len(prefix) == self.limit or (prefix and prefix[-1] in self.eos_ids):
            yield 1.0, prefix
            return
        for token, prob in enumerate(self.probs("p", prefix).tolist()):
            if prob > 0:
                yield from ((prob * weight, response) for weight, response in self.responses((*prefix, token)))

    def variants(self, response: tuple[int, ...], position: int) -> list[Variant]:
        """Outcomes of one position of a response."""
        prefix = response[:position]
        p, q = self.probs("p", prefix), self.probs("q", prefix)
        accepted = float(acceptance_prob(torch.tensor(response[position]), q=p, p=q))
        variants: list[Variant] = [(accepted, ())] if accepted > 0 else []
        room = min(self.length, self.limit - 1 - position)
        if accepted < 1 - 1e-12:
            for token, prob in enumerate(residual_probs(q=p, p=q).tolist()):
                if prob > 0:
                    variants += [((1 - accepted) * prob * weight, branch) for weight, branch in self.branches(prefix, token, room)]
        return variants

    def branches(self, prefix: tuple[int, ...], token: int, room: int) -> Iterator[Variant]:
        first: Draw = (prefix, token)
        if token in self.eos_ids or room <= 1:
            yield 1.0, (first,)
            return
        for follower, prob in enumerate(self.probs("q", (*prefix, token)).tolist()):
            if prob > 0:
                yield from ((prob * weight, (first, *rest)) for weight, rest in self.branches((*prefix, token), follower, room - 1))

    def trace(self) -> tuple[np.ndarray, Trace]:
        """The probability of each row, and the trace that has them all."""
        weights, rows, paths, outcomes, branches = [], [], [], [], []
        for prob, response in self.responses():
            for variants in product(*(self.variants(response, position) for position in range(len(response)))):
                weights.append(prob * np.prod([weight for weight, _ in variants]))
                rows.append(TraceRow(str(len(rows)), "", tuple(PROMPT), response, self.limit))
                paths += [(response[:position], token) for position, token in enumerate(response)]
                outcomes += [bool(branch) for _, branch in variants]
                branches += [branch for _, branch in variants if branch]
        draws = [*paths, *(draw for branch in branches for draw in branch)]
        return np.array(weights), self.trace_of(rows, draws, np.array(outcomes), [len(branch) for branch in branches])

    def trace_of(self, rows: list[TraceRow], draws: list[Draw], is_rejected: np.ndarray, lengths: list[int]) -> Trace:
        seen = list(dict.fromkeys(draws))
        index = _index(draws, seen)
        logits = torch.stack([self.row("q", prefix)[0] for prefix, _ in seen])
        hidden = torch.stack([self.row("q", prefix)[1] for prefix, _ in seen])
        tokens = torch.tensor([token for _, token in seen])
        q, p = (torch.stack([self.probs(name, prefix) for prefix, _ in seen]) for name in ("q", "p"))
        log_probs = logits.log_softmax(-1)
        signals = {
            "entropy": entropy(logits),
            "max_prob": log_probs.exp().amax(-1),
            "log_token_prob": log_probs.gather(-1, tokens[:, None])[:, 0],
            "acceptance_prob": acceptance_prob(tokens, q, p),
        }
        return Trace(
            tuple(rows),
            self.sampling,
            self.length,
            tokens.numpy()[index],
            np.isin(tokens.numpy()[index], sorted(self.eos_ids)),
            {name: values.numpy()[index] for name, values in signals.items()},
            is_rejected,
            acceptance_rate(q, p).numpy()[index[: len(is_rejected)]],
            np.array(lengths, dtype=np.int64),
            TokenInputs(hidden[index], torch.arange(3), torch.eye(4, dtype=torch.float64)[:3]),
        )


@dataclass(frozen=True)
class Diary(Policy):
    """Every number that a policy is ever told moves its next decision: a wrong one anywhere changes the law of the counts."""

    signals = frozenset(AfterDraw._fields) - {"position"}
    fed_head = toy_head("fed", seed=1)
    drawn_head = toy_head("drawn", seed=2)

    def start(self):
        return 0.1, 0.0

    def begin(self, state):
        return (state[0] * 3.7 + 0.3) % 1.0, state[1] + 1

    def limit(self, state):
        return 1.0 + (state[0] * 10.0 + state[1]) % 3.0

    def stop_before(self, state, seen):
        return (state[0] + 3 * seen.entropy + 5 * seen.max_prob + expit(seen.fed_logit)) % 1.0 > 0.8

    def after(self, state, drawn):
        told = (drawn.entropy, drawn.max_prob, drawn.token_prob, expit(drawn.drawn_logit), expit(drawn.fed_logit), drawn.position)
        mixed = (state[0] + sum(weight * number for weight, number in zip((3, 5, 7, 11, 13, 0.17), told, strict=True))) % 1.0
        return (mixed, state[1]), mixed > 0.7

    def end(self, state, outcome):
        mixed = sum(weight * number for weight, number in zip((0.31, 0.43, 0.59, 7.0), outcome, strict=True))
        return (state[0] + mixed) % 1.0, state[1]


def _index(draws: list[Draw], seen: list[Draw]) -> np.ndarray:
    places = {draw: place for place, draw in enumerate(seen)}
    return np.array([places[draw] for draw in draws])


@lru_cache
def traced(sampling: str, limit: int, length: int, eos_ids: tuple[int, ...]) -> tuple[np.ndarray, Trace]:
    weights, trace = Toys(SAMPLINGS[sampling], limit=limit, length=length, eos_ids=eos_ids).trace()
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    return weights, trace


def assert_same_counts(
    policy: Policy, sampling: str = "plain", *, limit: int = 3, length: int = 3, eos_ids: tuple[int, ...] = (EOS,)
) -> None:
    """The law of all counts together is the same in replay and in the loop, to 1e-9."""
    weights, trace = traced(sampling, limit, length, eos_ids)
    counts = replay_settings(trace, policy).counts
    replayed: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, *numbers in zip(weights, *(getattr(counts, name)[0] for name in COUNTED), strict=True):
        replayed[tuple(map(int, numbers))] += weight
    decoder = decoder_of(policy, sampling=SAMPLINGS[sampling], eos_ids=eos_ids, length=length)

    def play(draws: Draws) -> tuple[int, ...]:
        counts = decoder.generate(PROMPT, limit, generator=draws).counts
        return tuple(getattr(counts, name) for name in COUNTED)

    assert_same_law(dict(replayed), law_of(play), tolerance=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_has_the_loops_law_of_counts_for_every_policy(policy):
    assert_same_counts(POLICIES[policy])


@pytest.mark.parametrize(("sampling", "limit"), [("plain", 3), ("top_k", 5), ("greedy", 4)])
def test_replay_tells_a_policy_every_number_that_the_loop_tells_it(sampling, limit):
    assert_same_counts(Diary(), sampling, limit=limit)


@pytest.mark.parametrize("policy", ["heuristic", "self_verify", "ada_edl"])
def test_replay_has_the_loops_law_for_policies_that_remember_rounds_over_several(policy):
    assert_same_counts(POLICIES[policy], "top_k", limit=4)


@pytest.mark.parametrize("sampling", sorted(set(SAMPLINGS) - {"plain"}))
@pytest.mark.parametrize("policy", ["entropy", "ada_edl", "both_heads"])
def test_replay_has_the_loops_law_under_every_sampling(policy, sampling):
    assert_same_counts(POLICIES[policy], sampling)


@pytest.mark.parametrize("eos_ids", [(), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("policy", ["fixed_length", "fed_head"])
def test_replay_has_the_loops_law_with_no_eos_and_with_several(policy, eos_ids):
    assert_same_counts(POLICIES[policy], eos_ids=eos_ids)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_replay_has_the_loops_law_at_every_length_limit_and_draft_length(limit, length):
    assert_same_counts(FixedLength(20), limit=limit, length=length)


def test_settings_side_by_side_are_replayed_as_they_would_be_alone():
    _, trace = traced("plain", 3, 3, (EOS,))
    values = np.array([0.0, 0.2, 0.35, 0.5, 1.0])
    together = replay_settings(trace, CumulativeTokenProb(values))
    for index, value in enumerate(values):
        alone = replay_settings(trace, CumulativeTokenProb(float(value)))
        for name in COUNTED:
            assert np.array_equal(getattr(together.counts, name)[index], getattr(alone.counts, name)[0])
        assert np.array_equal(together.lengths[index], alone.lengths[0])


def test_draft_lengths_add_up_to_the_counts():
    _, trace = traced("plain", 3, 3, (EOS,))
    replayed = replay_settings(trace, POLICIES["ada_edl"])
    assert np.array_equal(replayed.lengths.sum(-1), replayed.counts.num_target)
    assert np.array_equal(replayed.lengths @ np.arange(4), replayed.counts.num_drafted)


def test_the_oracle_discards_nothing_and_asks_the_target_once_per_rejection_and_once_more():
    _, trace = traced("plain", 3, 3, (EOS,))
    counts = replay_settings(trace, Oracle()).counts
    assert np.array_equal(counts.num_discarded, np.zeros_like(counts.num_discarded))
    before_last = np.ones(trace.num_positions, dtype=bool)
    before_last[trace.offsets[1:] - 1] = False
    rejected = np.add.reduceat(trace.is_rejected & before_last, trace.offsets[:-1])
    assert np.array_equal(counts.num_target[0], rejected + 1)


def test_no_policy_beats_the_oracle_on_any_row():
    _, trace = traced("plain", 3, 3, (EOS,))
    oracle = replay_settings(trace, Oracle()).counts
    for policy in POLICIES.values():
        counts = replay_settings(trace, policy).counts
        for ratio in (1.0, 3.0, 10.0):
            assert np.all(
                counts.num_draft_forwards + ratio * counts.num_target >= oracle.num_draft_forwards + ratio * oracle.num_target - 1e-9
            )


def test_the_loop_refuses_the_oracle():
    with pytest.raises(ValueError, match="outcomes"):
        decoder_of(Oracle())


def test_totals_are_sums_over_rows():
    _, trace = traced("plain", 3, 3, (EOS,))
    counts = replay(trace, POLICIES["fixed_length"])
    assert counts.num_emitted == trace.num_positions
    assert counts.num_drafted + counts.num_target == counts.num_emitted + counts.num_discarded


def test_a_part_of_a_trace_replays_as_it_does_in_the_whole():
    _, trace = traced("plain", 3, 2, (EOS,))
    rows = [0, 7, len(trace.rows) - 1, 30]
    for policy in (POLICIES["both_heads"], POLICIES["self_verify"]):
        whole, part = replay_settings(trace, policy).counts, replay_settings(trace.select(rows), policy).counts
        assert np.array_equal(whole.num_drafted[:, rows], part.num_drafted)
        assert np.array_equal(whole.num_target[:, rows], part.num_target)


def test_array_parameters_of_two_lengths_are_refused():
    _, trace = traced("plain", 3, 2, (EOS,))
    with pytest.raises(ValueError, match="lengths differ"):
        replay_settings(trace, type(POLICIES["ada_edl"])(np.zeros(2), np.zeros(3)))
