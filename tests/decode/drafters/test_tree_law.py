"""Trees in the real loop: the output has exactly the target's law, and counts are what was seen."""

import pytest

from decode import Counts, SpeculativeDecoder
from decode.drafters.trees import SHAPES, Shape, TreeDrafter, dynamic
from decode.loop.rounds import Round
from decode.policies import AdaEDL, Entropy, FixedLength, HeadPolicy, Policy
from lm import Sampling
from tests.cases import first_fast
from tests.toys.enumeration import ToyModel, assert_same_law, law_of, seeded
from tests.toys.loop import POLICIES, PROMPT, SAMPLINGS, toy_head, tree_decoder_of
from tests.toys.random_pairs import CONFIGS, greedy_of, random_pair

SMALL = {"dynamic": dynamic(2, 4), "cape": Shape(((0.5, 3), (1.0, 2))), "greedy chain": dynamic(1, None)}


def assert_target_law(policy: Policy, shape: Shape, sampling: Sampling, *, eos_ids: tuple[int, ...] = (2,), **how):
    """Exactly; law 4.4 holds on every branch."""
    decoder = tree_decoder_of(policy, shape, sampling=sampling, eos_ids=eos_ids, **how)
    found = law_of(lambda draws: decoder.generate(PROMPT, 3, generator=draws).token_ids)
    assert_same_law(found, decoder.target.law(PROMPT, 3, sampling=sampling, eos_ids=eos_ids))


CANDIDATE = toy_head("candidate", seed=2)
RULES = POLICIES | {
    "candidate_head": HeadPolicy(CANDIDATE, 0.5),
    "learning_candidate_head": HeadPolicy(CANDIDATE, 0.5, is_learning=True),
}


@pytest.mark.parametrize("policy", RULES)
def test_every_policy_keeps_the_target_law_on_trees(policy):
    for name in ("cold", "top_k", "greedy"):
        assert_target_law(RULES[policy], SMALL["dynamic"], SAMPLINGS[name])


def test_a_candidate_head_is_asked_when_a_drawn_time_head_is():
    drawn = toy_head("drawn", seed=2)
    drawn.load_state_dict(CANDIDATE.state_dict())
    decoders = [tree_decoder_of(HeadPolicy(head, 0.5), dynamic(2, 4)) for head in (CANDIDATE, drawn)]
    ours, theirs = (decoder.generate(PROMPT, 20, generator=seeded()).rounds for decoder in decoders)
    assert [played.drafted for played in ours] == [played.drafted for played in theirs]


@pytest.mark.parametrize("shape", SMALL)
def test_every_shape_keeps_the_target_law_under_every_sampling(shape):
    for sampling in SAMPLINGS.values():
        assert_target_law(Entropy(0.3), SMALL[shape], sampling, length=2)
        assert_target_law(FixedLength(2), SMALL[shape], sampling, eos_ids=(), read_every=2)


@pytest.mark.parametrize("architecture", first_fast(CONFIGS))
def test_greedy_output_equals_transformers_generate(architecture):
    target, draft = random_pair(architecture)
    prompt = [3, 1, 4, 1, 5]
    expected, kinds = greedy_of(target, prompt, 30), set()
    shapes = {FixedLength(4): dynamic(3, 10), Entropy(0.6): SHAPES["cape"], AdaEDL(): dynamic(4, None)}
    for policy, shape in shapes.items():
        decoder = SpeculativeDecoder(target, TreeDrafter(draft, policy, shape), sampling=Sampling(temperature=0.0))
        generation = decoder.generate(prompt, 30)
        assert list(generation.token_ids) == expected
        kinds |= {played.next_kind for played in generation.rounds}
        assert generation.counts.num_target < 30
    assert "bonus" in kinds


def test_counts_are_what_the_models_saw_and_a_target_that_holds_no_trees_is_refused():
    decoder = tree_decoder_of(FixedLength(2), dynamic(2, 4), sampling=Sampling(), eos_ids=())
    target, draft = decoder.target, decoder.drafter.model
    generation = decoder.generate(PROMPT, 12, generator=seeded())
    counts = generation.counts
    assert (counts.num_target, counts.num_draft_forwards) == (len(target.forwards), len(draft.forwards))
    assert counts.num_accepted == sum(len(played.path) for played in generation.rounds)
    assert sum(target.forwards) == len(PROMPT) + counts.num_drafted + counts.num_target - 1
    assert counts.num_drafted + counts.num_target == counts.num_emitted + counts.num_discarded
    assert max(len(played.path) for played in generation.rounds) == 2
    for make in (lambda: SpeculativeDecoder(ToyModel(1), decoder.drafter), lambda: TreeDrafter(ToyModel(1), Policy())):
        with pytest.raises(ValueError, match="a TreeDrafter needs models that hold trees"):
            make()


def test_what_a_tree_shows_as_refused_is_its_likeliest_path_behind_the_accepted_one():
    played = Round((5, 6, 7, 8, 9), 1, (5, 3), "limit", Counts(), 0.0, 0.0, parents=(-1, -1, 0, 0, 2), path=(0,))
    assert (played.rejected, played.next_kind) == ((7, 9), "residual")
    full = Round((5, 6), 1, (6, 3), "limit", Counts(), 0.0, 0.0, parents=(-1, -1), path=(1,))
    assert (full.rejected, full.next_kind) == ((), "bonus")
