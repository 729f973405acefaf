"""Requests of one batch draft what each would draft alone, whoever else is there (laws 4.3, 4.13)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from decode import ModelDrafter, SpeculativeDecoder, policies
from decode.loop.signals import BatchSignals
from decode.policies import AdaEDL, AfterDraw, FixedLength, Heuristic, Policy, SelfVerify
from decode.policies.auto import Auto
from decode.policies.batch import batched
from decode.policies.head import HeadPolicy
from heads import AcceptanceHead
from lm import GreedySampler, RandomSampler, Sampler, Sampling, verify
from serve.lanes import Lane, Lanes, RequestRow
from tests.toys.enumeration import seeded
from tests.toys.loop import BothHeads, LearnedProb, random_head
from tests.toys.small_pair import EOS, LENGTH, LIMIT, PROMPTS, model

GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling()
STOPS = frozenset({EOS})


def head(timing: str, *, inputs: bool | tuple[str, ...]) -> AcceptanceHead:
    return random_head(16, timing, inputs, inputs is True, seed=len(timing) + bool(inputs), std=0.3)


FED, DRAWN, PREFIX = head("fed", inputs=False), head("drawn", inputs=True), head("prefix", inputs=False)
FORGETFUL: list[Policy] = [FixedLength(0), FixedLength(3), policies.TokenProb(0.3), policies.CumulativeTokenProb(0.2)]
FORGETFUL += [policies.MaxProb(0.4), policies.Entropy(0.45), HeadPolicy(FED, 0.6)]
FORGETFUL += [HeadPolicy(head("fed", inputs=inputs), 0.6) for inputs in (True, ("text_position",))]
FORGETFUL += [HeadPolicy(DRAWN, 0.5), BothHeads((FED, DRAWN), 0.7), HeadPolicy(PREFIX, 0.5)]
REMEMBERING: list[Policy] = [Heuristic(2), SelfVerify(1.0), AdaEDL(0.4), Auto(DRAWN, 1.0, 4.0), Auto(FED, 1.0, 4.0)]
LEARNING: list[Policy] = [LearnedProb(0.5), HeadPolicy(DRAWN, 0.5, is_learning=True)]
LEARNING.append(Auto(PREFIX, 1.0, 4.0, is_learning=True))


@dataclass
class Asked:
    """One request, and what became of it: of each verified round, the tokens drafted and what the policy saw."""

    id: str
    policy: Policy
    prompt: list[int]
    draws: Sampler
    rounds: list[tuple[list[int], list[AfterDraw]]] = field(default_factory=list)
    verified: tuple[int, ...] = ()
    num_accepted: int = 0
    num_begun: int = 0

    def __post_init__(self) -> None:
        self.committed = list(self.prompt)

    @property
    def num_left(self) -> int:
        return len(self.prompt) + LIMIT - len(self.committed)

    def begin(self) -> RequestRow:
        self.num_begun, self.laws, self.fed, self.seen = self.num_begun + 1, [], list(self.committed), []
        room = min(LENGTH, self.num_left - 1)
        return RequestRow(self.id, self.policy, self.verified, self.num_accepted, room, STOPS)


class FakeEngine:
    """A serving engine in miniature: a continuous batch that drafts in lockstep, and may make requests wait."""

    def __init__(self, sampling: Sampling, num_rows: int, waits: frozenset[int]) -> None:
        """`waits`: rounds whose draft is not verified: the request loses its row, and comes back later."""
        self.sampling, self.num_rows, self.waits, self.most_remembered = sampling, num_rows, waits, 0
        self.lanes, self.signals = Lanes(), BatchSignals(model(2).get_input_embeddings())

    @torch.inference_mode()
    def run(self, requests: Sequence[Asked]) -> None:
        """Serve all of them; a row that is free takes the next."""
        waiting, batch = list(requests), list[Asked]()
        while waiting or batch:
            num_free = self.num_rows - len(batch)
            batch, waiting = batch + waiting[:num_free], waiting[num_free:]
            self.draft(batch, alive={asked.id for asked in waiting if asked.num_begun} | {asked.id for asked in batch})
            self.most_remembered = max(self.most_remembered, len(self.lanes._alive))
            for asked, tokens in list(zip(batch, self.lanes.drafts, strict=True)):
                if asked.num_begun in self.waits:
                    batch.remove(asked)
                    waiting.append(asked)
                    asked.verified = ()
                elif self.verify(asked, tokens):
                    batch.remove(asked)

    def draft(self, batch: list[Asked], alive: set[str]) -> None:
        goes_on, position = self.lanes.begin([asked.begin() for asked in batch], alive), 0
        while goes_on:
            outputs = [model(2)(torch.tensor([asked.fed]), output_hidden_states=True) for asked in batch]
            logits = torch.cat([output.logits[:, -1] for output in outputs])
            hidden = torch.cat([output.hidden_states[-1][:, -1] for output in outputs])
            token = torch.tensor([self.token(*row) for row in zip(range(len(batch)), batch, logits, strict=True)])
            nums_before = [len(asked.committed) - len(asked.prompt) for asked in batch]
            given = {"policies": self.lanes.policies, "nums_before": nums_before}
            tokens, drawn = self.signals.read(position, logits, hidden, token, **given)
            for asked, token_id, one in zip(batch, tokens, drawn, strict=True):
                asked.seen.append(one)
                asked.fed.append(token_id)
            goes_on, position = self.lanes.step(tokens, drawn), position + 1

    def token(self, place: int, asked: Asked, logits: Tensor) -> int:
        """A row that has stopped gets any token, and draws none."""
        law = self.sampling.dists(logits[None], asked.fed)[0]
        asked.laws.append(law)
        return asked.draws.token(law) if self.lanes._rows[place].run.is_going else (7 * place) % len(law)

    def verify(self, asked: Asked, tokens: list[int]) -> bool:
        """Verify a draft; True if the request has ended."""
        fed = asked.committed + tokens
        logits = model(1, 2)(torch.tensor([fed])).logits[0, len(asked.committed) - 1 :]
        verdict = verify(tokens, asked.laws[: len(tokens)], self.sampling.dists(logits, fed), asked.draws)
        asked.verified, asked.num_accepted = tuple(tokens), verdict.num_accepted
        asked.rounds.append((tokens, asked.seen[: len(tokens)]))
        emitted = tokens[: verdict.num_accepted]
        has_ended = EOS in emitted
        asked.committed += emitted if has_ended else [*emitted, verdict.next_token]
        return EOS in asked.committed[-1:] or asked.num_left < 1


class Watched(ModelDrafter):
    """Keeps what its policy saw of each round."""

    def start(self, session):
        self.seen: list[list[AfterDraw]] = []
        super().start(session)

    def conclude(self, committed, num_accepted):
        self.seen.append([drawn for _, drawn in self.run.steps])
        super().conclude(committed, num_accepted)


def draws(place: int) -> RandomSampler:
    return RandomSampler(seeded(place))


def served(
    rules: list[Policy], sampling: Sampling, *, num_rows: int = 4, waits: frozenset[int] = frozenset()
) -> tuple[FakeEngine, list[Asked]]:
    engine = FakeEngine(sampling, num_rows, waits)
    requests = [
        Asked(str(i), rule, prompt, GreedySampler() if sampling.is_greedy else draws(i))
        for i, (rule, prompt) in enumerate(zip(rules, PROMPTS, strict=False))
    ]
    engine.run(requests)
    return engine, requests


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
    rules = [*FORGETFUL, *REMEMBERING, *(LEARNING if sampling.is_greedy else [])]
    check_alone(served(rules, sampling)[1], sampling)


def test_requests_of_one_policy_keep_their_memories_apart():
    for policy in REMEMBERING:
        check_alone(served([policy] * 6, SAMPLED)[1], SAMPLED)


def test_a_request_that_had_to_wait_goes_on_as_if_it_had_not():
    rules = [*REMEMBERING, *LEARNING, *FORGETFUL[5:8]]
    check_alone(served(rules, GREEDY, num_rows=3, waits=frozenset({1, 3}))[1], GREEDY)


def test_requests_under_the_batchs_rule_get_the_tokens_that_they_get_alone_beside_others():
    rules = [batched(Auto(head, 1.0, 4.0), 1) for head in (DRAWN, FED)]
    _, requests = served([*rules, FixedLength(3), HeadPolicy(DRAWN, 0.5)] * 3, GREEDY, waits=frozenset({2}))
    how = {"sampling": GREEDY, "max_draft_length": LENGTH}
    for place, request in enumerate(requests):
        decoder = SpeculativeDecoder(model(1, 2), ModelDrafter(model(2), FixedLength(0)), **how)
        assert request.committed == [*PROMPTS[place], *decoder.generate(PROMPTS[place], LIMIT).token_ids]
    # the rule drafts, and not one length
    assert {len(tokens) for request in requests[::4] for tokens, _ in request.rounds} > {1}


def test_lanes_remember_the_living_alone():
    assert served([Heuristic(2)] * 12, GREEDY, num_rows=3)[0].most_remembered == 3


def row(policy: Policy, room: int = 5) -> RequestRow:
    return RequestRow("a", policy, (), 0, room, STOPS)


def test_another_request_of_the_same_id_starts_anew_and_one_without_room_drafts_and_learns_nothing():
    lanes = Lanes()
    assert not lanes.begin([row(Heuristic(2), room=0)], {"a"})
    assert lanes.drafts == [[]]
    for policy, expected in ((Heuristic(2), 2), (FixedLength(3), 3)):
        assert lanes.begin([row(policy)], {"a"})
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
