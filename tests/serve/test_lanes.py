"""Requests of one batch draft what each would draft alone, whoever else is there (laws 4.3, 4.13)."""

import pytest
import torch

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import (
    AdaEDL,
    AfterDraw,
    CumulativeTokenProb,
    Entropy,
    FixedLength,
    Heuristic,
    MaxProb,
    Policy,
    SelfVerify,
    TokenProb,
)
from decode.policies.auto import Auto
from decode.policies.batch import batched
from decode.policies.head import HeadPolicy
from heads import AcceptanceHead
from lm import GreedySampler, RandomSampler, Sampling
from serve.lanes import Lane, Lanes, RequestRow
from tests.toys.fake_engine import Asked, FakeEngine
from tests.toys.loop import LearnedMaxProb, LearnedProb
from tests.toys.small_pair import EOS, LENGTH, LIMIT, PROMPTS, model

GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling()
STOPS = frozenset({EOS})


def head(timing: str, *, inputs: bool | tuple[str, ...]) -> AcceptanceHead:
    made = AcceptanceHead(16, 2, timing, inputs, inputs is True)
    with torch.random.fork_rng():
        torch.manual_seed(len(timing) + bool(inputs))
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


FED, DRAWN, PREFIX = head("fed", inputs=False), head("drawn", inputs=True), head("prefix", inputs=False)
FORGETFUL: list[Policy] = [
    FixedLength(0),
    FixedLength(3),
    TokenProb(0.3),
    CumulativeTokenProb(0.2),
    MaxProb(0.4),
    Entropy(0.45),
    HeadPolicy(FED, 0.6),
    HeadPolicy(head("fed", inputs=True), 0.6),
    HeadPolicy(DRAWN, 0.5),
    HeadPolicy(FED, 0.7, also=DRAWN),
    HeadPolicy(PREFIX, 0.5),
    HeadPolicy(head("fed", inputs=("text_position",)), 0.6),
]
REMEMBERING: list[Policy] = [Heuristic(2), SelfVerify(1.0), AdaEDL(0.4), Auto(DRAWN, 1.0, 4.0), Auto(FED, 1.0, 4.0)]
LEARNING: list[Policy] = [
    LearnedProb(0.5),
    LearnedMaxProb(0.5),
    HeadPolicy(DRAWN, 0.5, is_learning=True),
    Auto(PREFIX, 1.0, 4.0, is_learning=True),
]


class Watched(ModelDrafter):
    """Keeps what its policy saw of each round."""

    def start(self, session):
        self.seen: list[list[AfterDraw]] = []
        super().start(session)

    def conclude(self, committed, num_accepted):
        self.seen.append([drawn for _, drawn in self.run.steps])
        super().conclude(committed, num_accepted)


def draws(place: int) -> RandomSampler:
    return RandomSampler(torch.Generator().manual_seed(place))


def asked(policies: list[Policy], **how) -> list[Asked]:
    return [
        Asked(
            str(i),
            policy,
            list(prompt),
            LIMIT,
            draws(i) if not how.get("greedy") else GreedySampler(),
            how.get("waits", frozenset()),
        )
        for i, (policy, prompt) in enumerate(zip(policies, PROMPTS, strict=False))
    ]


def served(
    policies: list[Policy], sampling: Sampling, *, num_rows: int = 4, waits: frozenset[int] = frozenset()
) -> list[Asked]:
    engine = FakeEngine(model(1, 2), model(2), sampling=sampling, eos=EOS, num_rows=num_rows, longest=LENGTH)
    requests = asked(policies, greedy=sampling.is_greedy, waits=waits)
    engine.run(requests)
    return requests


def check_alone(requests: list[Asked], sampling: Sampling) -> None:
    """Every request's rounds and signals are those of the loop."""
    for place, request in enumerate(requests):
        drafter = Watched(model(2), request.policy)
        decoder = SpeculativeDecoder(model(1, 2), drafter, sampling=sampling, max_draft_length=LENGTH)
        alone = decoder.generate(PROMPTS[place], LIMIT, generator=draws(place))
        assert [tokens for tokens, _ in request.rounds] == [list(one.drafted) for one in alone.rounds], request.policy
        assert request.committed == [*PROMPTS[place], *alone.token_ids]
        for (_, shown), expected in zip(request.rounds, drafter.seen, strict=True):
            for there, here in zip(shown, expected, strict=True):
                names = ("position", *request.policy.signals)
                assert [getattr(there, name) for name in names] == pytest.approx(
                    [getattr(here, name) for name in names], abs=1e-4
                )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(0.7, top_p=0.9)])
def test_a_batch_drafts_what_each_of_its_requests_drafts_alone(sampling: Sampling):
    check_alone(served([*FORGETFUL, *REMEMBERING, *(LEARNING if sampling.is_greedy else [])], sampling), sampling)


def test_requests_of_one_policy_keep_their_memories_apart():
    for policy in REMEMBERING:
        requests = served([policy] * 6, SAMPLED)
        check_alone(requests, SAMPLED)


def test_a_request_that_had_to_wait_goes_on_as_if_it_had_not():
    policies = [*REMEMBERING, *LEARNING, *FORGETFUL[5:8]]
    check_alone(served(policies, GREEDY, num_rows=3, waits=frozenset({1, 3})), GREEDY)


def test_requests_under_the_batchs_rule_get_the_tokens_that_they_get_alone_beside_others():
    policies = [
        batched(Auto(DRAWN, 1.0, 4.0), 1),
        batched(Auto(FED, 1.0, 4.0), 1),
        FixedLength(3),
        HeadPolicy(DRAWN, 0.5),
    ] * 3
    requests = served(policies, GREEDY, waits=frozenset({2}))
    for place, request in enumerate(requests):
        decoder = SpeculativeDecoder(
            model(1, 2), ModelDrafter(model(2), FixedLength(0)), sampling=GREEDY, max_draft_length=LENGTH
        )
        assert request.committed == [*PROMPTS[place], *decoder.generate(PROMPTS[place], LIMIT).token_ids]
    # the rule drafts, and not one length
    assert {len(tokens) for request in requests[::4] for tokens, _ in request.rounds} > {1}


def test_lanes_remember_the_living_alone():
    engine = FakeEngine(model(1, 2), model(2), sampling=GREEDY, eos=EOS, num_rows=3, longest=LENGTH)
    engine.run(asked([Heuristic(2)] * 12, greedy=True))
    assert engine.most_remembered == 3


def row(request: str, policy: Policy, *, verified=(), num_accepted=0, room=5) -> RequestRow:
    return RequestRow(request, policy, verified, num_accepted, room, STOPS)


def test_another_request_of_the_same_id_starts_anew():
    lanes = Lanes()
    for policy, expected in ((Heuristic(2), 2), (FixedLength(3), 3)):
        lanes.begin([row("a", policy)], {"a"})
        for token in range(5):
            lanes.step([token], [AfterDraw(token)])
        assert len(lanes.drafts[0]) == expected


def test_a_row_without_room_drafts_nothing_and_learns_nothing():
    lanes = Lanes()
    assert not lanes.begin([row("a", Heuristic(2), room=0)], {"a"})
    assert lanes.drafts == [[]]
    assert lanes.begin([row("a", Heuristic(2))], {"a"})


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
def test_what_a_policy_learns_of_a_round_is_what_the_target_verified(
    verified: tuple[int, ...], num_accepted: int, expected: int
):
    lane = Lane(Heuristic(2))
    lane.begin(5, STOPS)
    for token in (4, 5):
        lane.take(token, AfterDraw(0))
    lane.end(verified, num_accepted)
    lane.begin(5, STOPS)
    assert lane.run.num_tokens == expected


def test_nothing_is_drafted_after_an_end():
    lane = Lane(FixedLength(5))
    lane.begin(5, STOPS)
    lane.take(EOS, AfterDraw(0))
    assert not lane.run.is_going
