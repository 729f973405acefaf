"""What each level of a hierarchy does: caches, signals, tau, counts, greedy decoding (law 4.12; laws 4.4, 4.5)."""

from dataclasses import dataclass, field

import pytest
import torch
from transformers import LlamaForCausalLM

from decode import Drafter, Generation, ModelDrafter, SpeculativeDecoder
from decode.drafters.hierarchies import CONFIGURATIONS, InnerRounds, InterleavedDrafter, PreVerifiedDrafter, hsddw
from decode.policies import Entropy, FixedLength, Policy, SelfVerify
from lm import CachedModel, Sampling, entropy
from tests.cases import first_fast
from tests.toys.enumeration import ToyModel, seeded
from tests.toys.random_pairs import greedy_of
from tests.toys.small_pair import random_llama

PROMPT = [0, 1, 2]
VOCAB, EOS = 6, 5


class CheckedModel(CachedModel):
    """Every row it returns is that of an uncached forward over the same tokens."""

    text = ()

    def feed(self, new_tokens, num_rows=1):
        self.text = [*self.text[: len(self)], *new_tokens]
        rows = super().feed(new_tokens, num_rows)
        with torch.inference_mode():
            whole = self.model(input_ids=torch.tensor([self.text])).logits[0, -num_rows:]
        torch.testing.assert_close(rows, whole, atol=1e-9, rtol=0)
        return rows


SIZES = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"max_position_embeddings": 64, "eos_token_id": EOS, "pad_token_id": EOS}


@pytest.fixture(scope="module")
def trio() -> tuple[LlamaForCausalLM, ...]:
    return tuple(random_llama(seed, **SIZES, initializer_range=1.0) for seed in (1, 2, 3))


def drafters(micro: CachedModel, draft: CachedModel) -> dict[str, Drafter]:
    every: dict[str, Drafter] = {name: hsddw(micro, draft, configuration=name, window=3) for name in CONFIGURATIONS}
    every["pre-verify without bonus"] = hsddw(micro, draft, configuration="pre-verify", window=3, bonus=False)
    every["full without bonus"] = hsddw(micro, draft, window=3, bonus=False)
    every["fixed"] = PreVerifiedDrafter(ModelDrafter(micro, FixedLength(2)), draft, FixedLength(5))
    every["interleaved"] = InterleavedDrafter(micro, draft, m=2, n=2)
    return every


NAMES = list(drafters(ToyModel(1), ToyModel(2)))


def generate(
    drafter: Drafter, target: CachedModel, *, sampling: Sampling | None = None, seed: int = 0, new: int = 24
) -> Generation:
    decoder = SpeculativeDecoder(target, drafter, sampling=sampling, eos_ids=frozenset({EOS}), max_draft_length=8)
    return decoder.generate(PROMPT, new, generator=seeded(seed))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_hierarchies_say_what_the_target_alone_says_and_caches_agree_with_uncached_forwards(trio, name):
    """Every row of all three models is compared, of sampled texts too."""
    micro, draft, target = (CheckedModel(model) for model in trio)
    drafter = drafters(micro, draft)[name]
    assert list(generate(drafter, target, sampling=Sampling(temperature=0)).token_ids) == greedy_of(trio[2], PROMPT, 24)
    for seed in range(2):
        generate(drafter, target, sampling=Sampling(), seed=seed)
        assert len(micro) <= len(PROMPT) + 24
        assert len(draft) > len(PROMPT)


@pytest.mark.parametrize("name", first_fast(NAMES, 3))
def test_a_hierarchy_stops_drafting_where_a_context_is_full(trio, name):
    micro, draft, target = (CachedModel(model) for model in trio)
    decoder = SpeculativeDecoder(target, drafters(micro, draft)[name], eos_ids=frozenset(), max_draft_length=8)
    assert len(decoder.generate(PROMPT, 62, generator=seeded()).token_ids) == 62


def test_a_hierarchy_without_an_inner_level_is_the_draft_alone():
    """Same draws, same tokens, same counts: an empty inner round is plain drafting."""
    alone = ModelDrafter(ToyModel(2), SelfVerify(initial=1.0))
    empty = PreVerifiedDrafter(ModelDrafter(ToyModel(3), FixedLength(0)), ToyModel(2), SelfVerify(initial=1.0))
    for seed in range(5):
        one, other = (generate(drafter, ToyModel(1), seed=seed) for drafter in (alone, empty))
        assert one.counts == other.counts
        assert [played.emitted for played in one.rounds] == [played.emitted for played in other.rounds]


PRE_VERIFIED = PreVerifiedDrafter(ModelDrafter(ToyModel(1), FixedLength(3)), ToyModel(1), Policy())
"""Four rounds of 8 + 1 tokens; 8 drafted tokens are inner rounds of 3 + 1 and 3 + 1."""


@pytest.mark.parametrize(
    ("drafter", "num_tokens", "expected"),
    [
        (PRE_VERIFIED, 36, (4, 32, 32, 8, 24, 24)),
        (InterleavedDrafter(ToyModel(1), ToyModel(1), m=2, n=3), 27, (3, 24, 24, 6, 18, 18)),
    ],
)
def test_identical_models_never_reject_and_counts_are_what_the_schedule_says(drafter, num_tokens, expected):
    decoder = SpeculativeDecoder(ToyModel(1), drafter, eos_ids=frozenset(), max_draft_length=8)
    counts = decoder.generate(PROMPT, num_tokens, generator=seeded()).counts
    names = ("num_target", "num_drafted", "num_accepted", "num_draft_forwards", "num_micro", "num_micro_forwards")
    assert tuple(getattr(counts, name) for name in names) == expected


@dataclass(frozen=True)
class Spy(Policy):
    """Stops at nothing and remembers everything."""

    signals = frozenset({"entropy", "token_prob", "max_prob"})
    drawn: list = field(default_factory=list)
    outcomes: list = field(default_factory=list)

    def after(self, state, drawn):
        self.drawn.append(drawn)
        return state, False

    def end(self, state, outcome):
        self.outcomes.append(outcome)
        return state

    @property
    def rejected_entropies(self) -> list[float]:
        rejections = [outcome for outcome in self.outcomes if outcome.num_accepted < outcome.num_drafted]
        return [outcome.rejected_entropy for outcome in rejections]


def test_each_level_sees_its_own_models_signals_and_the_rejections_of_the_level_above():
    """tau_2 and tau_1: H of the draft (the micro) where the target (the draft) rejected; neither sees the other's."""
    inner, outer = Spy(), Spy()
    drafter = PreVerifiedDrafter(ModelDrafter(ToyModel(3), inner), ToyModel(2), outer, rounds=InnerRounds(window=2))
    ids, expected, rejected = list(PROMPT), [], []
    for played in generate(drafter, ToyModel(1), new=16).rounds:
        rows = [ToyModel(2).feed([*ids, *played.drafted[:position]])[-1] for position in range(len(played.drafted))]
        for position, (token, logits) in enumerate(zip(played.drafted, rows, strict=True)):
            expected.append((position, float(entropy(logits)), float(logits.softmax(-1)[token])))
        if played.num_accepted < len(played.drafted):
            rejected.append(float(entropy(rows[played.num_accepted])))
        ids += played.emitted
    assert len(expected) > 10
    seen = [(drawn.position, drawn.entropy, drawn.token_prob) for drawn in outer.drawn]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))
    assert rejected
    torch.testing.assert_close(torch.tensor(outer.rejected_entropies), torch.tensor(rejected))
    assert inner.rejected_entropies
    assert set(inner.rejected_entropies) <= {drawn.entropy for drawn in inner.drawn}


def test_full_hsddw_ends_a_draft_at_the_first_position_where_the_draft_is_unsure():
    """With tau fixed at 0.8 nats, every drafted token but the last has H at most 0.8, over several inner rounds."""
    fixed_tau = Entropy(max_sqrt_entropy=0.8**0.5, scale=1.0)
    drafter = hsddw(ToyModel(2), ToyModel(2), window=2, policies=(FixedLength(2), fixed_tau))
    generation, ids = generate(drafter, ToyModel(1), new=60), list(PROMPT)
    for played in generation.rounds:
        texts = [[*ids, *played.drafted[:i]] for i in range(len(played.drafted))]
        entropies = [float(entropy(ToyModel(2).feed(text)[-1])) for text in texts]
        assert all(value <= 0.8 for value in entropies[:-1])
        assert played.stop_reason != "policy" or entropies[-1] > 0.8
        ids += played.emitted
    assert max(len(played.drafted) for played in generation.rounds) > 3


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: InnerRounds(window=-1), "window is -1"),
        (lambda: InnerRounds(max_rounds=-1), "max_rounds is -1"),
        (lambda: InterleavedDrafter(ToyModel(1), ToyModel(2), m=-1), "m is -1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(wrong, named):
    with pytest.raises(ValueError, match=named):
        wrong()
