"""Hierarchies emit exactly the target's distribution (law 4.12; laws 4.2, 4.3), at two to four levels, whatever stops
each level; and each level has its own cache, signals and counts (laws 4.4, 4.5).

As in test_losslessness, every branch of the loop's draws is walked, in float64, on toys that disagree.
"""

from dataclasses import dataclass, field

import pytest
import torch
from transformers import LlamaForCausalLM

from decode import Drafter, Generation, ModelDrafter, SpeculativeDecoder
from decode.drafters.hierarchies import CONFIGURATIONS, InnerRounds, InterleavedDrafter, PreVerifiedDrafter, hsddw
from decode.policies import Entropy, FixedLength, Policy
from lm import CachedModel, Sampling, entropy
from lm.verification import num_accepted
from tests.cases import first_fast
from tests.toys import loop
from tests.toys.enumeration import ToyModel, assert_same_law, law_of, seeded
from tests.toys.loop import POLICIES, PROMPT, SAMPLINGS
from tests.toys.random_pairs import greedy_of
from tests.toys.small_pair import random_llama

TARGET, DRAFT, MICRO, NANO = 1, 2, 3, 4


def hierarchy(
    draft_policy: Policy = Policy(),  # noqa: B008
    micro_policy: Policy = FixedLength(2),  # noqa: B008
    *,
    words: int = 3,
    **rounds: object,
) -> PreVerifiedDrafter:
    """Micro drafts, draft pre-verifies, with inner rounds of two tokens."""
    inner = ModelDrafter(ToyModel(MICRO, words), micro_policy)
    return PreVerifiedDrafter(inner, ToyModel(DRAFT, words), draft_policy, rounds=InnerRounds(**{"window": 2} | rounds))


def interleaved(m: int, n: int) -> InterleavedDrafter:
    return InterleavedDrafter(ToyModel(MICRO), ToyModel(DRAFT), m=m, n=n)


def assert_lossless(
    drafter: Drafter, num_tokens: int = 3, *, sampling: str = "plain", eos_ids=(2,), length: int = 20, words: int = 3
) -> None:
    """The distribution of the loop on this drafter is the target's, to 1e-12; law 4.4 holds on every branch."""
    settings = {"sampling": SAMPLINGS[sampling], "eos_ids": frozenset(eos_ids), "max_draft_length": length}
    loop.assert_lossless(SpeculativeDecoder(ToyModel(TARGET, words), drafter, **settings), num_tokens)


BINARY = {"eos_ids": (), "words": 2}
"""Two words and no EOS keep the branches few."""
ROUNDS = [{"max_rounds": 0}, {"max_rounds": 1}, {"max_rounds": 1, "num_alone": 2}, {"bonus": False}, {"window": 0}]
ROUNDS += [{"max_rounds": 1, "num_alone": 1, "bonus": False}, {"window": 1, "bonus": False}]
CASES = {
    **{f"draft stops by {name}": (hierarchy(policy), {}) for name, policy in POLICIES.items()},
    **{f"micro stops by {name}": (hierarchy(micro_policy=policy), {}) for name, policy in POLICIES.items()},
    **{
        f"both stop by {name}": (hierarchy(POLICIES[name], POLICIES[name]), {})
        for name in ("self_verify", "heuristic", "ada_edl", "both_heads")
    },
    **{name: (hierarchy(POLICIES["entropy"]), {"sampling": name}) for name in SAMPLINGS},
    **{
        f"{number} tokens, EOS {eos_ids}": (hierarchy(), {"num_tokens": number, "eos_ids": eos_ids})
        for eos_ids in ((), (0, 2), (0, 1, 2))
        for number in (1, 2, 3)
    },
    **{f"drafts of {length}": (hierarchy(), {"length": length}) for length in (0, 1, 2)},
    **{f"inner rounds {rounds}": (hierarchy(POLICIES["entropy"], words=2, **rounds), BINARY) for rounds in ROUNDS},
    **{  # four tokens, so that a second inner round drafts too
        f"second inner round, {name}": (hierarchy(POLICIES[name], words=2, window=1), BINARY | {"num_tokens": 4})
        for name in ("never_draft", "fixed_length", "self_verify", "entropy")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_three_levels_preserve_the_target_law_for_every_policy_of_the_draft(case):
    """And for every policy of the micro model, sampling, EOS and schedule."""
    drafter, settings = CASES[case]
    assert_lossless(drafter, **settings)


def test_four_levels_preserve_the_target_law():
    nano = ModelDrafter(ToyModel(NANO), FixedLength(1))
    inner = PreVerifiedDrafter(nano, ToyModel(MICRO), POLICIES["self_verify"], rounds=InnerRounds(window=1))
    chen = InterleavedDrafter(ToyModel(NANO), ToyModel(MICRO), m=1, n=1)
    for each, policy in ((inner, "entropy"), (chen, "self_verify")):
        assert_lossless(PreVerifiedDrafter(each, ToyModel(DRAFT), POLICIES[policy], rounds=InnerRounds(window=2)))


LENGTHS = (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (3, 0)


@pytest.mark.parametrize(
    ("m", "n", "settings"),
    [
        *((m, n, {"eos_ids": ids}) for m, n in LENGTHS for ids in ((), (2,))),
        *((2, 1, {"sampling": sampling}) for sampling in SAMPLINGS),
    ],
)
def test_interleaved_models_preserve_the_target_law(m, n, settings):
    assert_lossless(interleaved(m, n), **settings)


class PrintedDecoder(SpeculativeDecoder):
    """The loop of Chen's Algorithm 2 as printed: biased."""

    def _verify_chain(self, text, proposal, draws):
        p = self.sampling.dists(self.target.feed(text[len(self.target) :] + proposal.tokens, len(proposal.tokens) + 1))
        proposal.accepted = range(num_accepted(proposal.tokens, proposal.dists, p, draws))
        return draws.token(p[len(proposal.accepted)])


@pytest.mark.parametrize(("m", "n"), [(1, 0), (1, 1), (2, 1)])
def test_a_replacement_drawn_from_plain_p_as_chen_prints_it_is_biased(m, n):
    """Off by what the docstring of `interleaved` says, and exact only at temperature 0."""
    decoder = PrintedDecoder(ToyModel(TARGET), interleaved(m, n), eos_ids=frozenset())
    printed = law_of(lambda draws: decoder.generate(PROMPT, 3, generator=draws).token_ids)
    with pytest.raises(AssertionError, match="against"):
        assert_same_law(printed, decoder.target.law(PROMPT, 3, sampling=decoder.sampling, eos_ids=frozenset()))
    if m == 1:
        p, q = (ToyModel(seed).feed(PROMPT)[-1].softmax(-1) for seed in (TARGET, MICRO if n else DRAFT))
        decoder.max_draft_length = 1
        first = law_of(lambda draws: decoder.generate(PROMPT, 2, generator=draws).token_ids[0])
        overlap = torch.minimum(p, q)
        assert_same_law(first, dict(enumerate((overlap + (1 - overlap.sum()) * p).tolist())))
    greedy = {"sampling": SAMPLINGS["greedy"], "eos_ids": frozenset()}
    decoders = [kind(ToyModel(TARGET), interleaved(m, n), **greedy) for kind in (PrintedDecoder, SpeculativeDecoder)]
    assert len({decoder.generate(PROMPT, 12).token_ids for decoder in decoders}) == 1


class DropsByValue(PreVerifiedDrafter):
    """Illegal (law 4.3): looks at the emitted token, then throws it away."""

    def take(self, token, drawn, q):
        if token == 0:
            self.proposal.stop_reason = "policy"
            return False
        return super().take(token, drawn, q)


def test_dropping_an_inner_token_by_its_value_is_caught():
    inner = ModelDrafter(ToyModel(MICRO), FixedLength(2))
    with pytest.raises(AssertionError, match="against"):
        assert_lossless(DropsByValue(inner, ToyModel(DRAFT), Policy(), rounds=InnerRounds(window=2)))


TEXT = [0, 1, 2]
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
    return decoder.generate(TEXT, new, generator=seeded(seed))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_hierarchies_say_what_the_target_alone_says_and_caches_agree_with_uncached_forwards(trio, name):
    """Every row of all three models is compared, of sampled texts too."""
    micro, draft, target = (CheckedModel(model) for model in trio)
    drafter = drafters(micro, draft)[name]
    assert list(generate(drafter, target, sampling=Sampling(temperature=0)).token_ids) == greedy_of(trio[2], TEXT, 24)
    for seed in range(2):
        generate(drafter, target, sampling=Sampling(), seed=seed)
        assert len(micro) <= len(TEXT) + 24
        assert len(draft) > len(TEXT)


@pytest.mark.parametrize("name", first_fast(NAMES, 3))
def test_a_hierarchy_stops_drafting_where_a_context_is_full(trio, name):
    micro, draft, target = (CachedModel(model) for model in trio)
    decoder = SpeculativeDecoder(target, drafters(micro, draft)[name], eos_ids=frozenset(), max_draft_length=8)
    assert len(decoder.generate(TEXT, 62, generator=seeded()).token_ids) == 62


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
    counts = decoder.generate(TEXT, num_tokens, generator=seeded()).counts
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
    ids, expected, rejected = list(TEXT), [], []
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
    generation, ids = generate(drafter, ToyModel(1), new=60), list(TEXT)
    for played in generation.rounds:
        texts = [[*ids, *played.drafted[:i]] for i in range(len(played.drafted))]
        entropies = [float(entropy(ToyModel(2).feed(text)[-1])) for text in texts]
        assert all(value <= 0.8 for value in entropies[:-1])
        assert played.stop_reason != "policy" or entropies[-1] > 0.8
        ids += played.emitted
    assert max(len(played.drafted) for played in generation.rounds) > 3


def test_a_schedule_that_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="max_rounds is -1"):
        InnerRounds(max_rounds=-1)
    with pytest.raises(ValueError, match="m is -1"):
        interleaved(-1, 2)
