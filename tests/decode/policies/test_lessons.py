"""Law 4.14: after verification the policy learns what it knew when each token was drawn, and how the token fared."""

from collections.abc import Sequence

import pytest
import torch

from decode import ModelDrafter, SpeculativeDecoder
from decode.drafters.hierarchies import InnerRounds, PreVerifiedDrafter
from decode.drafters.trees import Dynamic
from decode.policies import FixedLength, Policy
from decode.policies.base import AfterDraw, Outcome, State
from serve.lanes import Lane
from tests.toys.enumeration import ToyModel
from tests.toys.loop import PROMPT, ToyBatch, decoder_of, tree_decoder_of


class Pupil(Policy):
    """Records the arguments of `after` and `feedback`; its state has the round and the tokens drawn in it before."""

    signals = frozenset({"token_prob"})
    zero_feedback = (0.0,)

    def __init__(self) -> None:
        self.asked: list[tuple[State, AfterDraw]] = []
        self.taught: list[tuple[State, AfterDraw]] = []
        self.sums: list[State] = []

    def start(self) -> State:
        return 0.0, 0.0

    def begin(self, state: State) -> State:
        return state[0] + 1.0, 0.0

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, bool]:
        self.asked.append((state, drawn))
        return (state[0], state[1] + drawn.token_prob), drawn.position >= 2

    def feedback(self, state: State, drawn: AfterDraw, acceptance_prob: float) -> State:
        assert 0.0 <= acceptance_prob <= 1.0
        self.taught.append((state, drawn))
        return (1.0,)

    def end(self, state: State, outcome: Outcome) -> State:
        self.sums.append(outcome.feedback)
        return state


def num_revealed(rounds: Sequence) -> int:
    """The accepted tokens and the first rejected one of each round."""
    return sum(one.num_accepted + (one.num_accepted < len(one.drafted)) for one in rounds)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def chain(pupil: Pupil) -> int:
    return num_revealed(decoder_of(pupil, eos_ids=()).generate(PROMPT, 40, generator=seeded()).rounds)


def batch(pupil: Pupil) -> int:
    decoder = decoder_of(pupil, eos_ids=())
    decoder._batch_model = ToyBatch
    generations = decoder.generate_batch([PROMPT, [1]], 20, batch_size=2, generator=seeded())
    return sum(num_revealed(each.rounds) for each in generations)


def tree(pupil: Pupil) -> None:
    tree_decoder_of(pupil, Dynamic(2, 4), eos_ids=()).generate(PROMPT, 40, generator=seeded())


def nested(micro: Policy, draft: Policy) -> int:
    drafter = PreVerifiedDrafter(ModelDrafter(ToyModel(3), micro), ToyModel(2), draft, rounds=InnerRounds(window=3))
    decoder = SpeculativeDecoder(ToyModel(1), drafter, eos_ids=frozenset())
    return num_revealed(decoder.generate(PROMPT, 40, generator=seeded()).rounds)


def outer(pupil: Pupil) -> int:
    return nested(FixedLength(3), pupil)


def inner(pupil: Pupil) -> None:
    nested(pupil, Policy())


def lane(pupil: Pupil) -> int:
    each = Lane(pupil)
    for num_accepted in (0, 1, 2, 3):
        each.begin(5, frozenset())
        for position in range(3):
            each.take(position, AfterDraw(position, token_prob=0.25 + 0.125 * position))
        assert each.end([0, 1, 2], num_accepted)
    return 1 + 2 + 3 + 3


@pytest.mark.parametrize("play", [chain, batch, tree, outer, inner, lane])
def test_feedback_comes_with_what_was_known_when_a_token_was_drawn(play):
    pupil = Pupil()
    num_expected = play(pupil)
    assert all(each in pupil.asked for each in pupil.taught)
    assert {drawn.position for _, drawn in pupil.taught} >= {0, 1}
    assert sum(total for (total,) in pupil.sums) == len(pupil.taught)
    assert num_expected in (None, len(pupil.taught))


class Candid(Pupil):
    """Looks at no token."""

    after = Policy.after


def test_a_tree_teaches_a_policy_that_looks_at_no_candidate():
    pupil = Candid()
    tree_decoder_of(pupil, Dynamic(2, 4), eos_ids=(), length=2).generate(PROMPT, 60, generator=seeded())
    assert {drawn.position for _, drawn in pupil.taught} == {0, 1}


def test_a_policy_without_feedback_gets_none():
    totals = []

    class Listener(FixedLength):
        def end(self, state: State, outcome: Outcome) -> State:
            totals.append(outcome.feedback)
            return state

    decoder_of(Listener(2)).generate(PROMPT, 8, generator=seeded())
    assert set(totals) == {()}
