"""Law 4.14: after verification the policy learns what it knew when each token was drawn, and how the token fared."""

from collections.abc import Sequence

import pytest

from decode import ModelDrafter, SpeculativeDecoder
from decode.drafters.hierarchies import InnerRounds, PreVerifiedDrafter
from decode.drafters.trees import dynamic
from decode.policies import FixedLength, Policy
from decode.policies.base import AfterDraw, Outcome, State
from serve.lanes import Lane
from tests.toys.enumeration import ToyModel, seeded
from tests.toys.loop import PROMPT, decoder_of, tree_decoder_of


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


def played(decoder: SpeculativeDecoder) -> int:
    return num_revealed(decoder.generate(PROMPT, 40, generator=seeded()).rounds)


def batch(pupil: Pupil) -> int:
    decoder = decoder_of(pupil, eos_ids=())
    generations = decoder.generate_batch([PROMPT, [1]], 20, batch_size=2, generator=seeded())
    return sum(num_revealed(each.rounds) for each in generations)


def nested(micro: Policy, draft: Policy) -> SpeculativeDecoder:
    drafter = PreVerifiedDrafter(ModelDrafter(ToyModel(3), micro), ToyModel(2), draft, rounds=InnerRounds(window=3))
    return SpeculativeDecoder(ToyModel(1), drafter, eos_ids=frozenset())


def lane(pupil: Pupil) -> int:
    each = Lane(pupil)
    for num_accepted in (0, 1, 2, 3):
        each.begin(5, frozenset())
        for position in range(3):
            each.take(position, AfterDraw(position, token_prob=0.25 + 0.125 * position))
        assert each.end([0, 1, 2], num_accepted)
    return 1 + 2 + 3 + 3


PLAYS = {
    "chain": lambda pupil: played(decoder_of(pupil, eos_ids=())),
    "batch": batch,
    "tree": lambda pupil: played(tree_decoder_of(pupil, dynamic(2, 4), eos_ids=())) and None,
    "outer": lambda pupil: played(nested(FixedLength(3), pupil)),
    "inner": lambda pupil: played(nested(pupil, Policy())) and None,
    "lane": lane,
}
"""What teaches a pupil; where that is counted, the number of lessons."""


@pytest.mark.parametrize("play", PLAYS)
def test_feedback_comes_with_what_was_known_when_a_token_was_drawn(play):
    pupil = Pupil()
    num_expected = PLAYS[play](pupil)
    assert all(each in pupil.asked for each in pupil.taught)
    assert {drawn.position for _, drawn in pupil.taught} >= {0, 1}
    assert sum(total for (total,) in pupil.sums) == len(pupil.taught)
    assert num_expected in (None, len(pupil.taught))


class Candid(Pupil):
    """Looks at no token."""

    after = Policy.after


def test_a_tree_teaches_a_policy_that_looks_at_no_candidate():
    candid = Candid()
    tree_decoder_of(candid, dynamic(2, 4), eos_ids=(), length=2).generate(PROMPT, 60, generator=seeded())
    assert {drawn.position for _, drawn in candid.taught} == {0, 1}
