"""Law 4.14: whoever verified a token tells the policy what it knew when the token was drawn, and how the token
fared.
"""

from collections.abc import Sequence

import torch

from decode import ModelDrafter, SpeculativeDecoder
from decode.drafters.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.drafters.trees.shapes import Dynamic
from decode.policies import FixedLength, Policy
from decode.policies.base import AfterDraw, Outcome, State
from serve.lanes import Lane
from tests.decode.loop.test_batch import ToySeats
from tests.toys.enumeration import ToyModel
from tests.toys.loop import PROMPT, decoder_of
from tests.toys.trees import tree_decoder_of


class Pupil(Policy):
    """Notes what `after` and `feedback` are told; its state says which round it is, and which tokens were drawn in it
    before.
    """

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


def assert_told_what_was_known(pupil: Pupil) -> None:
    """Each feedback comes with the state and the token that `after` was given together; some are of tokens behind the
    first of a round.
    """
    assert pupil.taught
    assert all(each in pupil.asked for each in pupil.taught)
    assert {drawn.position for _, drawn in pupil.taught} >= {0, 1}
    assert sum(total for (total,) in pupil.sums) == len(pupil.taught)


def num_revealed(rounds: Sequence) -> int:
    """The accepted tokens and the first rejected one of each round."""
    return sum(one.num_accepted + (one.num_accepted < len(one.drafted)) for one in rounds)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_loop_teaches_what_was_known_when_a_token_was_drawn():
    pupil = Pupil()
    generation = decoder_of(pupil, eos_ids=()).generate(PROMPT, 40, generator=seeded())
    assert_told_what_was_known(pupil)
    assert len(pupil.taught) == num_revealed(generation.rounds)


def test_a_batch_teaches_what_was_known_when_a_token_was_drawn(monkeypatch):
    monkeypatch.setattr(SpeculativeDecoder, "_seats", lambda self, model, num: ToySeats(model, num))
    pupil = Pupil()
    generations = decoder_of(pupil, eos_ids=()).generate_batch([PROMPT, [1]], 20, batch_size=2, generator=seeded())
    assert_told_what_was_known(pupil)
    assert len(pupil.taught) == sum(num_revealed(each.rounds) for each in generations)


def test_a_tree_teaches_what_was_known_when_a_candidate_was_seen():
    pupil = Pupil()
    tree_decoder_of(pupil, Dynamic(2, 4), eos_ids=()).generate(PROMPT, 40, generator=seeded())
    assert_told_what_was_known(pupil)


class Candid(Pupil):
    """Looks at no token."""

    after = Policy.after


def test_a_tree_teaches_a_policy_that_looks_at_no_candidate():
    pupil = Candid()
    tree_decoder_of(pupil, Dynamic(2, 4), eos_ids=(), length=2).generate(PROMPT, 60, generator=seeded())
    assert {drawn.position for _, drawn in pupil.taught} == {0, 1}


def test_both_levels_of_a_hierarchy_are_taught_what_they_knew_when_a_token_was_drawn():
    micro, draft = Pupil(), Pupil()
    drafter = PreVerifiedDrafter(ModelDrafter(ToyModel(3), micro), ToyModel(2), draft, rounds=InnerRounds(window=3))
    decoder = SpeculativeDecoder(ToyModel(1), drafter, eos_ids=frozenset())
    generation = decoder.generate(PROMPT, 40, generator=seeded())
    for pupil in (micro, draft):
        assert_told_what_was_known(pupil)
    assert len(draft.taught) == num_revealed(generation.rounds)


def test_an_engines_lane_teaches_what_was_known_when_a_token_was_drawn():
    pupil = Pupil()
    lane = Lane(pupil)
    for num_accepted in (0, 1, 2, 3):
        lane.begin(5, frozenset())
        for place in range(3):
            lane.take(place, AfterDraw(place, 0.0, 0.0, 0.0, 0.0, 0.25 + 0.125 * place, 0.0))
        assert lane.end([0, 1, 2], num_accepted)
    assert_told_what_was_known(pupil)
    assert len(pupil.taught) == 1 + 2 + 3 + 3


def test_a_policy_without_lessons_is_told_none():
    told = []

    class Listener(FixedLength):
        def end(self, state: State, outcome: Outcome) -> State:
            told.append(outcome.feedback)
            return state

    decoder_of(Listener(2)).generate(PROMPT, 8, generator=seeded())
    assert set(told) == {()}
