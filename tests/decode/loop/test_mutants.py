"""The loop, broken on purpose: each of MUTANTS fails the test that it names.

The named test passes on the real loop (it runs in its own module); here it must raise AssertionError on the mutant.
"""

from dataclasses import replace

import pytest
import test_counts as counts
import test_losslessness as laws
import torch

import decode.loop.decoder
import decode.loop.rounds
import lm.draws
import lm.verification
from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import FixedLength
from lm import GreedySampler, RandomSampler, residual_probs
from lm.verification import revealed_probs, verify_rows
from tests.toys.enumeration import ToyModel

_propose, _round = ModelDrafter.propose, SpeculativeDecoder._round
_counts_of, _feed, _ratio = decode.loop.rounds.counts_of, ToyModel.feed, lm.verification._ratio


def _last_row_residual(count, q, p, draws):
    return p[-1] if count == len(q) else residual_probs(q[-1], p[-2])


def _bonus_from_previous_row(tokens, q, p, draws):
    [(drafted, rows)] = zip(tokens, p, strict=True)
    return verify_rows(tokens, q, [torch.cat([rows[:-1], rows[-2:-1] if drafted else rows[-1:]])], draws)


def _q_before_warping(self, committed, max_tokens):
    """Tokens are drawn from the warped q; verification is told the plain softmax."""
    proposal = _propose(self, committed, max_tokens)
    texts = [committed + proposal.tokens[:i] for i in range(len(proposal.tokens))]
    proposal.dists = [ToyModel(2).feed(text)[-1].softmax(-1) for text in texts]
    return proposal


def _q_shifted(self, committed, max_tokens):
    """Each token comes with the distribution of the one before it."""
    proposal = _propose(self, committed, max_tokens)
    proposal.dists = [*proposal.dists[:1], *proposal.dists[:-1]]
    return proposal


def _cut(drafter, proposal, num_kept):
    for column in (proposal.tokens, proposal.dists, drafter.run.steps):
        del column[num_kept:]
    return proposal


def _drop_by_value(self, committed, max_tokens):
    """Draw, look, drop: the illegal shape of law 4.3."""
    proposal = _propose(self, committed, max_tokens)
    is_dropped = len(proposal.tokens) > 0 and proposal.dists[-1][proposal.tokens[-1]] < 0.4
    return _cut(self, proposal, len(proposal.tokens) - int(is_dropped))


def _learn_ahead(self, committed, max_tokens):
    """A draft ends before the first token that its own verification will reveal as likelier rejected than not."""
    proposal = _propose(self, committed, max_tokens)
    p = self._session.sampling.dists(ToyModel(1).feed(committed + proposal.tokens, len(proposal.tokens) + 1))
    chances = revealed_probs(proposal.tokens, proposal.dists, p, RandomSampler())
    return _cut(self, proposal, next((i for i, chance in enumerate(chances) if chance < 0.5), len(chances)))


def _draft_past_eos(self, committed, max_tokens):
    self._session = decode.Session(self._session.sampling, frozenset(), self._session.draws)
    return _propose(self, committed, max_tokens)


def _overrun(self, committed, num_left, draws):
    return _round(self, committed, num_left + 1, draws)


def _emit_past_eos(self, committed, num_left, draws):
    eos_ids, self.eos_ids = self.eos_ids, frozenset()
    played = _round(self, committed, num_left, draws)
    self.eos_ids = eos_ids
    return played


def _no_bonus_token(self, committed, num_left, draws):
    """After full acceptance only the draft is emitted: lossless still, and one token a round poorer."""
    length = len(committed)
    played = _round(self, committed, num_left, draws)
    if not played.drafted or played.next_kind != "bonus":
        return played
    committed.pop()
    for model in (self.target, self.drafter.model):
        model.roll_back(len(committed) - 1)
    return replace(played, emitted=tuple(committed[length:]))


def _miscounting(**wrong):
    """Counts of a round in which each named one is what its function says."""

    def counts_of(proposal, num_accepted, num_emitted):
        values = {name: value(proposal, num_accepted, num_emitted) for name, value in wrong.items()}
        return replace(_counts_of(proposal, num_accepted, num_emitted), **values)

    return counts_of


def _stale_cache(self, length):
    """Positions are counted right, but the last one still holds the rejected token."""
    if length < len(self.fed):
        self.fed = [*self.fed[: length - 1], *self.fed[-1:]]


def _forgetful_cache(self, length):
    """Rolls back one token too far: right, and slower."""
    if length < len(self.fed):
        del self.fed[length - 1 :]


class _SharedUniforms(RandomSampler):
    """One uniform serves a token's draw and its acceptance."""

    def __init__(self, generator=None):
        super().__init__(generator)
        seed = int(torch.randint(2**62, (1,), generator=generator))
        self._tokens, self._accepts = (lm.draws._stream(seed) for _ in range(2))


class _Reseeded(RandomSampler):
    """Every verification starts its acceptance uniforms anew from one seed."""

    def num_accepted(self, acceptance_probs):
        self._accepts = lm.draws._stream(1)
        return super().num_accepted(acceptance_probs)


class _CountAll(RandomSampler):
    """Counts every token that passes, and not only those before the first that fails."""

    def num_accepted(self, acceptance_probs):
        return sum(next(self._accepts) < acceptance_prob for acceptance_prob in acceptance_probs)


def _uncut_feed(self, new_tokens, num_rows=1):
    """Logits of a padded vocabulary, uncut."""
    vocab_size, self.vocab_size = self.vocab_size, self.width
    try:
        return _feed(self, new_tokens, num_rows)
    finally:
        self.vocab_size = vocab_size


PER_SAMPLING = laws.test_every_policy_preserves_the_target_law_under_every_sampling
PLAIN = PER_SAMPLING, ("fixed_length", "plain")
GREEDY = PER_SAMPLING, ("fixed_length", "greedy")
SWAPPED = PER_SAMPLING, ("token_prob", "plain")
TOYS = laws.test_vocabularies_padding_and_dtypes_of_every_kind_preserve_the_target_law
LIMITS = laws.test_the_length_limit_and_the_draft_length_never_change_the_law
ENDS = laws.test_a_round_emits_one_token_more_than_it_accepts_and_nothing_is_drafted_or_emitted_after_eos, (3, {0, 2})
COUNTS = counts.test_counts_are_what_drafter_target_and_cache_saw, ()
FEEDS = laws.test_every_forward_feeds_the_tokens_that_the_cache_lacks_and_no_others, ()
SAMPLED = laws.assert_sampled_law, (laws.Sampling(),)
OF_COUNTS = decode.loop.rounds, "counts_of"
DRAWS = decode.loop.decoder, "RandomSampler"
MUTANTS = {
    # what is broken: what replaces it, and the test that notices
    "residual_sign": ((lm.verification, "residual_probs", lambda q, p: residual_probs(p, q)), *PLAIN),
    "no_residual": ((lm.verification, "residual_probs", lambda q, p: p), PER_SAMPLING, ("entropy", "plain")),
    "accept_by_target_prob": ((lm.verification, "_ratio", lambda q, p: p), *PLAIN),
    "accept_swapped": ((lm.verification, "_ratio", lambda q, p: _ratio(p, q)), *SWAPPED),
    "last_row_residual": ((lm.verification, "next_dist", _last_row_residual), TOYS, ("five tokens",)),
    "bonus_from_previous_row": ((decode.loop.decoder, "verify_rows", _bonus_from_previous_row), *PLAIN),
    "q_before_warping": ((ModelDrafter, "propose", _q_before_warping), PER_SAMPLING, ("fixed_length", "top_k")),
    "q_shifted": ((ModelDrafter, "propose", _q_shifted), *PLAIN),
    "drop_by_value": ((ModelDrafter, "propose", _drop_by_value), *PLAIN),
    "learn_ahead": ((ModelDrafter, "propose", _learn_ahead), PER_SAMPLING, ("learning_head", "plain")),
    "draft_past_eos": ((ModelDrafter, "propose", _draft_past_eos), *ENDS),
    "second_best": ((lm.verification, "_best_tokens", lambda p: p.argsort()[:, -2].tolist()), *GREEDY),
    "all_agree": ((GreedySampler, "num_accepted", lambda self, probs: len(list(probs))), *GREEDY),
    "emit_past_eos": ((SpeculativeDecoder, "_round", _emit_past_eos), *ENDS),
    "overrun": ((SpeculativeDecoder, "_round", _overrun), LIMITS, (3, 2)),
    "no_bonus_token": ((SpeculativeDecoder, "_round", _no_bonus_token), ENDS[0], (2, {2})),
    "drafts_without_the_rejected": ((*OF_COUNTS, _miscounting(num_drafted=lambda _, accepted, __: accepted)), *COUNTS),
    # one emitted token of each round is booked as the target's, also where the draft's EOS ended it
    "accepted_without_eos": ((*OF_COUNTS, _miscounting(num_accepted=lambda _, __, emitted: emitted - 1)), *COUNTS),
    # a forward whose token was not drawn is not counted
    "no_unused": ((*OF_COUNTS, _miscounting(num_draft_forwards=lambda draft, *_: len(draft.tokens))), *COUNTS),
    "stale_cache": ((ToyModel, "roll_back", _stale_cache), LIMITS, (3, 4)),
    "forgetful_cache": ((ToyModel, "roll_back", _forgetful_cache), *FEEDS),
    "uncut_padding": ((ToyModel, "feed", _uncut_feed), TOYS, ("padded alike",)),
    "shared_uniforms": ((*DRAWS, _SharedUniforms), *SAMPLED),
    "reseeded": ((*DRAWS, _Reseeded), *SAMPLED),
    "count_all": ((*DRAWS, _CountAll), *SAMPLED),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_of_the_loop_fails_its_named_test(mutant, monkeypatch):
    patch, test, arguments = MUTANTS[mutant]
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError):
        test(*arguments)


def test_drop_by_value_emits_the_law_that_the_design_works_out(monkeypatch):
    """p = q = (.5, .3, .2) with "drop if q(y) < .4" emits (.75, .15, .10): law 4.3's example."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    decoder = laws.decoder_of(FixedLength(1), eos_ids=())
    for model in (decoder.target, decoder.drafter.model):
        monkeypatch.setattr(model, "feed", lambda ids, rows=1, feed=model.feed: feed(ids, rows) * 0 + probs.log())
    first = {0: 0.0, 1: 0.0, 2: 0.0}
    monkeypatch.setattr(*MUTANTS["drop_by_value"][0])
    for tokens, probability in laws.law(decoder, 2).items():
        first[tokens[0]] += probability
    assert first == pytest.approx({0: 0.75, 1: 0.15, 2: 0.10}, abs=1e-12)
