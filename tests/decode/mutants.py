"""The loop, broken on purpose: each entry replaces one attribute of the real code, as
`monkeypatch.setattr(*MUTANTS[name])` takes it.

test_mutants.py says which named test each of them fails.
"""

from dataclasses import replace

import torch

import decode.loop.decoder
import decode.loop.drafter
import decode.loop.rounds
import lm.draws
import lm.verification
from decode import ModelDrafter, SpeculativeDecoder
from lm import GreedySampler, RandomSampler, residual_probs, revealed_probs, verify
from tests.toys.enumeration import ToyModel

_propose, _round, _ratio = ModelDrafter.propose, SpeculativeDecoder._round, lm.verification._ratio
_counts_of = decode.loop.rounds._counts_of


def _residual_sign(q, p):
    return residual_probs(p, q)


def _no_residual(q, p):
    return p


def _accept_by_target_prob(token, q, p):
    return float(p[token])


def _accept_swapped(token, q, p):
    return _ratio(token, p, q)


def _last_row_residual(count, q, p, draws):
    return p[-1] if count == len(q) else residual_probs(q[-1], p[-2])


def _bonus_from_previous_row(tokens, q, p, draws):
    return verify(tokens, q, torch.cat([p[:-1], p[-2:-1] if len(tokens) else p[-1:]]), draws)


def _q_before_warping(self, committed, max_tokens):
    """Tokens are drawn from the warped q; verification is told the plain softmax."""
    proposal = _propose(self, committed, max_tokens)
    kept = []
    for i in range(len(proposal.tokens)):
        self.model.roll_back(0)
        kept.append(self.model.feed(committed + proposal.tokens[:i])[-1].softmax(-1))
    proposal.dists = kept
    return proposal


def _q_shifted(self, committed, max_tokens):
    """Each token comes with the distribution of the one before it."""
    proposal = _propose(self, committed, max_tokens)
    proposal.dists = [*proposal.dists[:1], *proposal.dists[:-1]]
    return proposal


def _drop_by_value(self, committed, max_tokens):
    """Draw, look, drop: the illegal shape of law 4.3."""
    proposal = _propose(self, committed, max_tokens)
    if proposal.tokens and proposal.dists[-1][proposal.tokens[-1]] < 0.4:
        for column in (proposal.tokens, proposal.dists, self.run.steps):
            column.pop()
    return proposal


def _learn_ahead(self, committed, max_tokens):
    """A draft ends before the first token of which its own verification will reveal that it is likelier rejected than
    not.
    """
    proposal = _propose(self, committed, max_tokens)
    p = self._session.sampling.dists(ToyModel(1).feed(committed + proposal.tokens, len(proposal.tokens) + 1))
    chances = revealed_probs(len(proposal.tokens), proposal.tokens, proposal.dists, p, RandomSampler())
    num_kept = next((i for i, chance in enumerate(chances) if chance < 0.5), len(chances))
    for column in (proposal.tokens, proposal.dists, self.run.steps):
        del column[num_kept:]
    return proposal


def _draft_past_eos(self, committed, max_tokens):
    self._session = decode.Session(self._session.sampling, frozenset(), self._session.draws)
    return _propose(self, committed, max_tokens)


def _second_best(self, probs):
    return int(probs.argsort()[-2])


def _all_agree(self, acceptance_probs):
    return len(list(acceptance_probs))


def _emit_past_eos(self, committed, num_left, draws):
    eos_ids, self.eos_ids = self.eos_ids, frozenset()
    played = _round(self, committed, num_left, draws)
    self.eos_ids = eos_ids
    return played


def _overrun(self, committed, num_left, draws):
    return _round(self, committed, num_left + 1, draws)


def _no_bonus_token(self, committed, num_left, draws):
    """After full acceptance only the draft is emitted: lossless still, and one token a round poorer."""
    length = len(committed)
    played = _round(self, committed, num_left, draws)
    if not played.drafted or played.next_kind != "bonus":
        return played
    committed.pop()
    self.target.roll_back(len(committed) - 1)
    self.drafter.model.roll_back(len(committed) - 1)
    return replace(played, emitted=tuple(committed[length:]))


def _drafts_without_the_rejected(proposal, num_accepted, num_emitted):
    return replace(_counts_of(proposal, num_accepted, num_emitted), num_drafted=num_accepted)


def _accepted_without_eos(proposal, num_accepted, num_emitted):
    """One emitted token of each round is booked as the target's, also where the draft's EOS ended it."""
    return replace(_counts_of(proposal, num_accepted, num_emitted), num_accepted=num_emitted - 1)


def _forwards_without_unused(proposal, num_accepted, num_emitted):
    """A forward whose token was not drawn is not counted."""
    return replace(_counts_of(proposal, num_accepted, num_emitted), num_draft_forwards=len(proposal.tokens))


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


_feed = ToyModel.feed

MUTANTS = {
    "residual_sign": (lm.verification, "residual_probs", _residual_sign),
    "no_residual": (lm.verification, "residual_probs", _no_residual),
    "accept_by_target_prob": (lm.verification, "_ratio", _accept_by_target_prob),
    "accept_swapped": (lm.verification, "_ratio", _accept_swapped),
    "last_row_residual": (lm.verification, "next_dist", _last_row_residual),
    "bonus_from_previous_row": (decode.loop.decoder, "verify", _bonus_from_previous_row),
    "q_before_warping": (ModelDrafter, "propose", _q_before_warping),
    "q_shifted": (ModelDrafter, "propose", _q_shifted),
    "drop_by_value": (ModelDrafter, "propose", _drop_by_value),
    "learn_ahead": (ModelDrafter, "propose", _learn_ahead),
    "draft_past_eos": (ModelDrafter, "propose", _draft_past_eos),
    "second_best": (GreedySampler, "token", _second_best),
    "all_agree": (GreedySampler, "num_accepted", _all_agree),
    "emit_past_eos": (SpeculativeDecoder, "_round", _emit_past_eos),
    "overrun": (SpeculativeDecoder, "_round", _overrun),
    "no_bonus_token": (SpeculativeDecoder, "_round", _no_bonus_token),
    "drafts_without_the_rejected": (decode.loop.rounds, "_counts_of", _drafts_without_the_rejected),
    "accepted_without_eos": (decode.loop.rounds, "_counts_of", _accepted_without_eos),
    "forwards_without_unused": (decode.loop.rounds, "_counts_of", _forwards_without_unused),
    "stale_cache": (ToyModel, "roll_back", _stale_cache),
    "forgetful_cache": (ToyModel, "roll_back", _forgetful_cache),
    "uncut_padding": (ToyModel, "feed", _uncut_feed),
    "shared_uniforms": (decode.loop.decoder, "RandomSampler", _SharedUniforms),
    "reseeded": (decode.loop.decoder, "RandomSampler", _Reseeded),
    "count_all": (decode.loop.decoder, "RandomSampler", _CountAll),
}
