"""Requests of one batch draft what each would draft alone, whoever else is there (laws 4.3, 4.13)."""

from collections.abc import Container, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch

from decode import ModelDrafter, SpeculativeDecoder, policies
from decode.loop.step import DraftSteps
from decode.policies import AdaEDL, AfterDraw, FixedLength, Heuristic, Policy, SelfVerify
from decode.policies.auto import Auto
from decode.policies.base import Number, State, mapped
from decode.policies.batch import BatchAuto, batched
from decode.policies.head import HeadPolicy
from heads import AcceptanceHead
from lm import Sampling
from lm.signals import Normalised
from serve.controller import MeasuredController
from serve.lanes import Lane, Lanes, RequestRow
from tests.toys.enumeration import seeded
from tests.toys.loop import BothHeads, Recalling, random_head
from tests.toys.small_pair import EOS, LENGTH, LIMIT, PROMPTS, model

GREEDY, STOPS = Sampling(temperature=0.0), frozenset({EOS})


def head(timing: str, *, inputs: bool | tuple[str, ...]) -> AcceptanceHead:
    return random_head(16, timing, inputs, inputs is True, seed=len(timing) + bool(inputs), std=0.3)


FED, DRAWN, PREFIX = head("fed", inputs=False), head("drawn", inputs=True), head("prefix", inputs=False)
FORGETFUL: list[Policy] = [FixedLength(0), FixedLength(3), policies.TokenProb(0.3), policies.CumulativeTokenProb(0.2)]
FORGETFUL += [policies.MaxProb(0.4), policies.Entropy(0.45), HeadPolicy(FED, 0.6)]
FORGETFUL += [HeadPolicy(head("fed", inputs=inputs), 0.6) for inputs in (True, ("text_position",))]
FORGETFUL += [HeadPolicy(DRAWN, 0.5), BothHeads((FED, DRAWN), 0.7), HeadPolicy(PREFIX, 0.5)]
REMEMBERING: list[Policy] = [Heuristic(2), SelfVerify(1.0), AdaEDL(0.4), Auto(DRAWN, 1.0, 4.0), Auto(FED, 1.0, 4.0)]
LEARNING: list[Policy] = [Recalling(), HeadPolicy(DRAWN, 0.5, is_learning=True)]
LEARNING.append(Auto(PREFIX, 1.0, 4.0, is_learning=True))


class Recorded(ModelDrafter):
    """Keeps the steps of its rounds: the text before each, its token, and what the policy saw."""

    def start(self, session):
        self.rounds: list[list[tuple[list[int], int, AfterDraw]]] = []
        self.states: list[State] = []
        super().start(session)

    def begin(self, committed, max_tokens):
        self.rounds.append([])
        self.text, limit = list(committed), super().begin(committed, max_tokens)
        self.states.append(self.run.state)
        return limit

    def take(self, token, drawn, q):
        self.rounds[-1].append(([*self.text, *self.proposal.tokens], token, drawn))
        return super().take(token, drawn, q)


class Request:
    """A request of a server, with the rounds that the loop plays for it alone."""

    num_begun = num_before = 0
    verified: tuple[Sequence[int], int] = (), 0

    def __init__(self, place: int, policy: Policy, sampling: Sampling) -> None:
        drafter = Recorded(model(2), policy)
        decoder = SpeculativeDecoder(model(1, 2), drafter, sampling=sampling, max_draft_length=LENGTH)
        played = decoder.generate(PROMPTS[place], LIMIT, generator=seeded(place)).rounds
        self.id, self.policy = str(place), policy
        self.rounds = list(zip(drafter.rounds, played, drafter.states, strict=True))
        self.were_cut: set[bool] = set()

    def begin(self) -> RequestRow:
        self.num_begun += 1
        room = min(LENGTH, LIMIT - self.num_before - 1)
        return RequestRow(self.id, self.policy, *self.verified, room, STOPS)

    def step(self, position: int) -> tuple[list[int], int, AfterDraw]:
        """The step at this position of the round; any step where the loop has stopped."""
        steps = self.rounds[0][0] or [([1], 1, AfterDraw(0))]
        return steps[min(position, len(steps) - 1)]

    def end(self, tokens: list[int]) -> bool:
        """End a verified round; True if the request has ended."""
        _, played, _ = self.rounds.pop(0)
        is_ruled = isinstance(self.policy, BatchAuto)  # which alone never stops
        assert tokens == list(played.drafted[: len(tokens) if is_ruled else None]), self.policy
        self.verified = tokens, min(played.num_accepted, len(tokens))
        self.num_before += len(played.emitted)
        self.were_cut.add(len(tokens) < len(played.drafted))
        return not self.rounds


def assert_close(ours: Number, theirs: Number) -> None:
    assert float(ours) == pytest.approx(float(theirs), abs=1e-3)


@torch.inference_mode()
def serve(requests: Sequence[Request], num_rows: int, waits: Container[int] = ()) -> int:
    """Serve requests in a continuous batch that drafts in lockstep: each drafts, sees and learns what it does
    alone.

    `waits`: rounds whose draft is not verified: the request loses its row, and comes back later. Returns the largest
    number of requests that were remembered.
    """
    signals, nums_remembered = DraftSteps(model(2).get_input_embeddings()), list[int]()
    clock = accumulate(np.random.default_rng(0).exponential(size=10_000))  # seconds of draft steps and verifications
    lanes = Lanes(MeasuredController(partial(next, clock)))
    waiting, batch = list(requests), list[Request]()
    while waiting or batch:
        num_free = num_rows - len(batch)
        batch, waiting = batch + waiting[:num_free], waiting[num_free:]
        alive = {request.id for request in batch} | {request.id for request in waiting if request.num_begun}
        lanes.begin([request.begin() for request in batch], alive)
        position = 0
        for lane, request in zip(lanes._rows, batch, strict=True):
            if lane.run.is_going:
                mapped(assert_close, lane.run.state, request.rounds[0][2])
        while lanes.is_going:
            texts, ids, expected = zip(*(request.step(position) for request in batch), strict=True)
            outputs = [model(2)(torch.tensor([text]), output_hidden_states=True) for text in texts]
            logits = torch.cat([output.logits[:, -1] for output in outputs])
            hidden = torch.cat([output.hidden_states[-1][:, -1] for output in outputs])
            given = {"policies": lanes.policies, "nums_before": [request.num_before for request in batch]}
            tokens, drawn = signals.read(position, Normalised(logits), hidden, torch.tensor(ids), **given)
            for lane, ours, theirs in zip(lanes._rows, drawn, expected, strict=True):
                for name in ("position", *lane.run.policy.signals) if lane.run.is_going else ():
                    assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-4), lane.run.policy
            lanes.step(tokens, drawn)
            position += 1
        nums_remembered.append(len(lanes._alive))
        for request, tokens in zip(list(batch), lanes.drafts, strict=True):
            if request.num_begun in waits:
                batch.remove(request)
                waiting.append(request)
                request.verified = (), 0
            elif request.end(tokens):
                batch.remove(request)
    return max(nums_remembered)


CASES = [(sampling, 4, ()) for sampling in (GREEDY, Sampling(), Sampling(0.7, top_p=0.9))]


@pytest.mark.parametrize(("sampling", "num_rows", "waits"), [*CASES, (GREEDY, 3, (1, 3))])
def test_a_batch_drafts_what_each_of_its_requests_drafts_alone(sampling, num_rows, waits):
    """Also where it had to wait, and where others have the same policy."""
    rules = [*FORGETFUL, *REMEMBERING, *REMEMBERING, *(LEARNING if sampling.is_greedy else [])]
    serve([Request(place, rule, sampling) for place, rule in enumerate(rules)], num_rows, waits)


def test_the_batchs_rule_stops_some_rows_and_leaves_the_others_as_they_are_alone():
    rules = [batched(Auto(head, 1.0, 4.0), 1) for head in (DRAWN, FED)]
    policies = [*rules, FixedLength(3), HeadPolicy(DRAWN, 0.5)] * 3
    requests = [Request(place, policy, GREEDY) for place, policy in enumerate(policies)]
    serve(requests, 4)
    assert set().union(*(request.were_cut for request in requests if request.policy in rules)) == {True, False}


def test_lanes_remember_the_living_alone():
    assert serve([Request(place, Heuristic(2), GREEDY) for place in range(12)], 3) == 3


def row(policy: Policy, room: int = 5) -> RequestRow:
    return RequestRow("a", policy, (), 0, room, STOPS)


def test_another_request_of_the_same_id_starts_anew_and_one_without_room_drafts_and_learns_nothing():
    lanes = Lanes()
    lanes.begin([row(Heuristic(2), room=0)], {"a"})
    assert (lanes.is_going, lanes.drafts) == (False, [[]])
    for policy, expected in ((Heuristic(2), 2), (FixedLength(3), 3)):
        lanes.begin([row(policy)], {"a"})
        assert lanes.is_going
        for token in range(5):
            lanes.step([token], [AfterDraw(token)])
        assert len(lanes.drafts[0]) == expected


@pytest.mark.parametrize(
    ("verified", "num_accepted", "expected"),
    [
        ((4, 5), 2, 4),  # all accepted
        ((4, 5), 1, 1),  # one rejected
        ((4,), 1, 4),  # cut by the scheduler: all that was verified was accepted
        ((), 0, 2),  # it had to wait
        ((0, 0), 0, 2),  # the engine verified something else
    ],
)
def test_what_a_policy_learns_of_a_round_is_what_the_target_verified(verified, num_accepted, expected):
    lane = Lane(Heuristic(2))
    lane.begin(5, STOPS)
    for token in (4, 5):
        lane.take(token, AfterDraw(0))
    lane.end(verified, num_accepted)
    lane.begin(5, STOPS)
    assert lane.run.num_tokens == expected
    lane.take(EOS, AfterDraw(0))
    assert not lane.run.is_going, "nothing is drafted after an end"
