"""Hierarchies emit exactly the target's distribution (law 4.12; laws 4.2, 4.3), at two to four levels, whatever stops
each level; and each level has its own cache, signals and counts (laws 4.4, 4.5).

As in test_losslessness, every branch of the loop's draws is walked, in float64, on toys that disagree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

import pytest
import torch

from decode import Drafter, Generation, ModelDrafter, SpeculativeDecoder
from decode.drafters.hierarchies import CONFIGURATIONS, InnerRounds, InterleavedDrafter, PreVerifiedDrafter, hsddw
from decode.policies import FixedLength, Policy
from lm import CachedModel, Sampling, entropy
from lm.verification import revealed_probs
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
        probs = revealed_probs(proposal.tokens, proposal.dists, p, draws)
        proposal.accepted = range(draws.num_accepted(probs))
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
            self.run.stop("policy")
            return False
        return super().take(token, drawn, q)


def test_dropping_an_inner_token_by_its_value_is_caught():
    inner = ModelDrafter(ToyModel(MICRO), FixedLength(2))
    with pytest.raises(AssertionError, match="against"):
        assert_lossless(DropsByValue(inner, ToyModel(DRAFT), Policy(), rounds=InnerRounds(window=2)))


TEXT, NUM = [0, 1, 2], 62
"""The last token fills the context."""
SIZES = {"vocab_size": 6, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"max_position_embeddings": 64, "eos_token_id": None, "pad_token_id": 5}


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


DRAFTERS: dict[str, Callable[[CachedModel, CachedModel], Drafter]] = {
    **{name: partial(hsddw, configuration=name, window=3) for name in CONFIGURATIONS},
    "full without bonus": partial(hsddw, window=3, bonus=False),
    "fixed": lambda micro, draft: PreVerifiedDrafter(ModelDrafter(micro, FixedLength(2)), draft, FixedLength(5)),
    "interleaved": partial(InterleavedDrafter, m=2, n=2),
}


def generate(
    drafter: Drafter, target: CachedModel, *, sampling: Sampling | None = None, seed: int = 0, new: int = NUM
) -> Generation:
    decoder = SpeculativeDecoder(target, drafter, sampling=sampling, eos_ids=frozenset(), max_draft_length=8)
    return decoder.generate(TEXT, new, generator=seeded(seed))


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_hierarchies_say_what_the_target_alone_says_and_caches_agree_with_uncached_forwards(name):
    """Up to the end of the context; every row of all three models is compared, of a sampled text too."""
    models = [random_llama(seed, **SIZES, initializer_range=1.0) for seed in (1, 2, 3)]
    micro, draft, target = map(CheckedModel, models)
    drafter = DRAFTERS[name](micro, draft)
    greedy = generate(drafter, target, sampling=Sampling(temperature=0))
    assert list(greedy.token_ids) == greedy_of(models[2], TEXT, NUM)
    assert len(generate(drafter, target).token_ids) == NUM
    assert len(micro) < len(TEXT) + NUM
    assert len(draft) > len(TEXT)


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
    counts = generate(drafter, ToyModel(1), new=num_tokens).counts
    names = ("num_target", "num_drafted", "num_accepted", "num_draft_forwards", "num_micro", "num_micro_forwards")
    assert tuple(getattr(counts, name) for name in names) == expected


@dataclass(frozen=True)
class Spy(Policy):
    """Stops where it is unsure, at most; remembers what it saw, and H at each rejection."""

    max_entropy: float = inf
    signals = frozenset({"entropy", "token_prob"})
    drawn: list = field(default_factory=list)
    rejected: list = field(default_factory=list)

    def after(self, state, drawn):
        self.drawn.append((drawn.position, drawn.entropy, drawn.token_prob))
        return state, drawn.entropy > self.max_entropy

    def end(self, state, outcome):
        if outcome.num_accepted < outcome.num_drafted:
            self.rejected.append(outcome.rejected_entropy)
        return state


def test_each_level_sees_its_own_models_signals_and_the_rejections_of_the_level_above_and_stops_where_it_is_unsure():
    """tau_2 and tau_1: H of the draft (the micro) where the target (the draft) rejected; neither sees the other's."""
    inner, outer = Spy(), Spy(0.8)
    drafter = hsddw(ToyModel(3), ToyModel(2), window=2, policies=(inner, outer))
    ids, expected, rejected = list(TEXT), [], []
    rounds = generate(drafter, ToyModel(1)).rounds
    for played in rounds:
        rows = [ToyModel(2).feed([*ids, *played.drafted[:position]])[-1] for position in range(len(played.drafted))]
        entropies = [float(entropy(logits)) for logits in rows]
        for position, (token, logits) in enumerate(zip(played.drafted, rows, strict=True)):
            expected.append((position, entropies[position], float(logits.softmax(-1)[token])))
        assert all(value <= 0.8 for value in entropies[:-1])
        assert played.stop_reason != "policy" or entropies[-1] > 0.8
        rejected += entropies[played.num_accepted : played.num_accepted + 1]
        ids += played.emitted
    assert max(len(played.drafted) for played in rounds) > 3
    torch.testing.assert_close(torch.tensor(outer.drawn), torch.tensor(expected))
    torch.testing.assert_close(torch.tensor(outer.rejected), torch.tensor(rejected))
    assert inner.rejected
    assert set(inner.rejected) <= {value for _, value, _ in inner.drawn}


def test_a_schedule_that_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match=r"max_rounds=-1, .* at least 0"):
        InnerRounds(max_rounds=-1)
    with pytest.raises(ValueError, match="m is -1"):
        interleaved(-1, 2)
