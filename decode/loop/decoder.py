"""The lossless speculative loop (laws 4.2, 4.4, 4.5): draft, verify, emit, until EOS or the length limit.

A round drafts at most min(max_draft_length, tokens left - 1) tokens, so that the token that every verification adds
still fits. The output has the distribution of the target alone under the same `Sampling`, for every drafter and policy.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from time import perf_counter
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.loop.batch import Batch, BatchRound
from decode.loop.drafter import Drafter, ModelDrafter, Proposal
from decode.loop.rounds import Generation, Round, settle_round
from decode.loop.session import Session, cached, check_free
from decode.policies.batch import batched
from lm import CachedModel, FeatureModel, RandomSampler, Sampler, Sampling, verify
from lm.batch import BatchModel
from lm.masks import Tree
from lm.verification import node_probs, verify_tree

Ids = Iterable[SupportsIndex]


class SpeculativeDecoder:
    """The lossless loop of a target and a drafter."""

    def __init__(
        self,
        target: PreTrainedModel | CachedModel,
        drafter: Drafter,
        *,
        sampling: Sampling | None = None,
        max_draft_length: int = 20,
        eos_ids: frozenset[int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Args:
        target: a `PreTrainedModel` is wrapped in a `CachedModel`.
        drafter: proposes chains or trees; its policy decides the draft length.
        sampling: the one transform of draft and target (law 4.1).
        max_draft_length: maximum draft length in tokens, or levels of a tree.
        eos_ids: tokens that end a generation; None: those of the target; an empty set: none.
        vocab_size: `Pair.vocab_size` if logits are wider than the tokenizer.
        """
        if max_draft_length < 0:
            raise ValueError(f"max_draft_length is {max_draft_length}; it must be at least 0 (0 never drafts)")
        needs_trees = getattr(drafter, "drafts_trees", False)
        self.target: CachedModel = cached(target, vocab_size=vocab_size, holds_trees=needs_trees)
        if needs_trees and not self.target.holds_trees:
            raise ValueError(f"a {type(drafter).__name__} needs a target that holds trees; pass holds_trees=True to it")
        self.drafter = drafter
        self.sampling = sampling or Sampling()
        self.max_draft_length = max_draft_length
        self.eos_ids = self.target.eos_ids if eos_ids is None else eos_ids
        self._is_streaming = False

    def generate(
        self, prompt_ids: Ids, max_new_tokens: SupportsIndex, *, generator: torch.Generator | Sampler | None = None
    ) -> Generation:
        """One generation; ids and limit may be of any integer type."""
        return Generation.of(self.stream(prompt_ids, max_new_tokens, generator=generator))

    def generate_batch(
        self,
        prompts: Iterable[Ids],
        max_new_tokens: SupportsIndex | Iterable[SupportsIndex],
        *,
        batch_size: SupportsIndex = 16,
        generator: torch.Generator | Sequence[Sampler] | None = None,
    ) -> list[Generation]:
        """One generation per prompt, `batch_size` at a time (law 4.13, `decode.loop.batch`), as `generate` makes it.

        Args:
            prompts: token ids of each: lists, arrays or tensors.
            max_new_tokens: length limit of all prompts, or one for each.
            batch_size: sequences at once; a prompt replaces one that has ended.
            generator: seeds the draws of each prompt in turn, whatever the batch size; or a sampler for each prompt.

        Raises:
            ValueError: as `generate`; a drafter of several models, a model whose cache cannot roll back single
                sequences.
        """
        batch, rounds = self.batch(prompts, max_new_tokens, batch_size=batch_size, generator=generator)
        for _ in rounds:
            pass
        return batch.generations

    def batch(
        self,
        prompts: Iterable[Ids],
        max_new_tokens: SupportsIndex | Iterable[SupportsIndex],
        *,
        batch_size: SupportsIndex = 16,
        generator: torch.Generator | Sequence[Sampler] | None = None,
    ) -> tuple[Batch, Iterator[BatchRound]]:
        """`generate_batch` round by round: (the batch, which collects generations; an iterator that plays rounds)."""
        if type(self.drafter) is not ModelDrafter or isinstance(self.drafter.model, FeatureModel):
            name = type(getattr(self.drafter, "model", self.drafter)).__name__
            raise ValueError(
                f"a {name} drafts for one prompt at a time; use generate, or a ModelDrafter of a separate draft model"
            )
        if (num_rows := integer_of(batch_size, "batch_size")) < 1:
            raise ValueError(f"batch_size is {num_rows}; it must be at least 1")
        all_ids = [ids_of(prompt) for prompt in prompts]
        limits = limits_of(max_new_tokens, len(all_ids))
        for ids, limit in zip(all_ids, limits, strict=True):
            self._check(len(ids), limit)
        draws = (
            [RandomSampler(generator) for _ in all_ids]
            if generator is None or isinstance(generator, torch.Generator)
            else generator
        )
        for model, role in ((self.target, "target"), (self.drafter.model, "draft")):
            check_free(model, role)  # its self-check may use its cache
            model.check_mode()
            for ids in all_ids:
                Session(self.sampling, self.eos_ids, draws[0], ids).check_prompt(model, role)
            if len({model.limit_of(len(ids)) for ids in all_ids}) > 1:
                raise ValueError(
                    f"prompts are on both sides of the length where the {role} changes its rotary frequencies "
                    f"(`lm.rope`), up to {max(map(len, all_ids))} tokens; decode the long ones apart"
                )
        target, draft = self._batch_model(self.target, num_rows), self._batch_model(self.drafter.model, num_rows)
        policy = batched(self.drafter.policy, num_rows)
        drafters = [ModelDrafter(row, policy) for row in draft.rows]
        batch = Batch(target, draft, drafters, sampling=self.sampling, eos_ids=self.eos_ids)
        return batch, batch.rounds(all_ids, limits, draws, max_draft_length=self.max_draft_length)

    def _batch_model(self, model: CachedModel, num: int) -> BatchModel:
        return BatchModel(model, num)

    def stream(
        self, prompt_ids: Ids, max_new_tokens: SupportsIndex, *, generator: torch.Generator | Sampler | None = None
    ) -> Iterator[Round]:
        """Rounds, each as soon as it is verified. Only one stream may be open at a time.

        Raises:
            ValueError: at the first round: no integers, an empty prompt, a text that exceeds the target's context,
                another open stream; a model that is in use or in train mode, or whose ids do not fit
                (`decode.loop.session`).
        """
        ids, limit = ids_of(prompt_ids), integer_of(max_new_tokens, "max_new_tokens")
        self._check(len(ids), limit)
        draws = RandomSampler(generator) if generator is None or isinstance(generator, torch.Generator) else generator
        self._is_streaming = True
        try:
            with Session(self.sampling, self.eos_ids, draws, ids) as session:
                yield from self._rounds(ids, limit, session)
        finally:
            self._is_streaming = False

    def _rounds(self, prompt_ids: Sequence[int], max_new_tokens: int, session: Session) -> Iterator[Round]:
        session.take(self.target, "target", verifies=True)
        self.target.reset()
        self.drafter.start(session)
        committed = list(prompt_ids)
        end = len(committed) + max_new_tokens
        while len(committed) < end:
            round_ = self._round(committed, end - len(committed), session.draws)
            yield round_
            if round_.emitted[-1] in self.eos_ids:
                return

    def _check(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ValueError unless the caches are free and the target's context fits; the last token is never fed."""
        if self._is_streaming:
            raise ValueError(
                "another stream of this decoder is open, and its caches hold one sequence; exhaust or close() that "
                "stream first, or make a second decoder with its own models and drafter"
            )
        if num_prompt_tokens < 1:
            raise ValueError("the prompt has no tokens; give at least 1, such as a BOS token")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
        limit = self.target.limit_of(num_prompt_tokens)
        if (room := limit + 1 - num_prompt_tokens) < max_new_tokens:
            remedy = f", or set max_new_tokens to at most {room:.0f}" if room > 0 else ""
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and {max_new_tokens} new ones exceed the target's context of "
                f"{limit:.0f}; shorten the prompt{remedy}"
            )

    @torch.inference_mode()
    def _round(self, committed: list[int], num_left: int, draws: Sampler) -> Round:
        started_s = perf_counter()
        proposal = self.drafter.propose(committed, min(self.max_draft_length, num_left - 1))
        drafted_s = perf_counter()
        verify_draft = self._verify_chain if proposal.tree is None else self._verify_tree
        next_token = verify_draft(committed, proposal, draws)
        return settle_round(
            committed,
            proposal,
            next_token,
            target=self.target,
            drafter=self.drafter,
            eos_ids=self.eos_ids,
            clock_s=(started_s, drafted_s),
        )

    def _verify_chain(self, text: list[int], proposal: Proposal, draws: Sampler) -> int:
        """Law 4.2: sets the accepted tokens and returns the next one."""
        logits = self.target.feed(text[len(self.target) :] + proposal.tokens, len(proposal.tokens) + 1)
        p = self.sampling.dists(logits, text, proposal.tokens)
        verdict = verify(proposal.tokens, proposal.dists, p, draws)
        proposal.set_accepted(verdict.num_accepted, p, draws)
        return verdict.next_token

    def _verify_tree(self, text: list[int], proposal: Proposal, draws: Sampler) -> int:
        """Law 4.2 with several candidates at each position."""
        tree, target = proposal.tree, self.target
        assert tree is not None
        p = self._tree_dists(target.feed_tree(text[len(target) :], tree), text, tree)
        proposal.accepted, next_token = verify_tree(tree, p, draws)
        if proposal.takes_feedback:
            proposal.acceptance_probs = node_probs(tree, proposal.best, p, draws)
        return next_token

    def _tree_dists(
        self, logits: Float[Tensor, "rows vocab"], text: list[int], tree: Tree
    ) -> Float[Tensor, "rows vocab"]:
        if self.sampling.sees_no_tokens:
            return self.sampling.dists(logits)
        paths = [[], *(tree.tokens_of(tree.path(node)) for node in range(len(tree)))]
        return torch.cat([self.sampling.dists(row[None], text, path) for row, path in zip(logits, paths, strict=True)])


def integer_of(value: Any, name: str) -> int:
    """An integer of Python's, numpy's or torch's; ValueError for anything else."""
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}); it must be an integer") from None


def ids_of(prompt_ids: Ids) -> list[int]:
    """The ids of one prompt, as Python's integers."""
    return [integer_of(token_id, "a token id of a prompt") for token_id in _listed(prompt_ids)]


def limits_of(max_new_tokens: Any, num_prompts: int) -> list[int]:
    """The length limit of each prompt, from one number or one for each."""
    limits = _listed(max_new_tokens)
    if not isinstance(limits, Iterable) or isinstance(limits, str):
        return [integer_of(limits, "max_new_tokens")] * num_prompts
    limits = [integer_of(limit, "an entry of max_new_tokens") for limit in limits]
    if len(limits) != num_prompts:
        raise ValueError(
            f"max_new_tokens has {len(limits)} entries for {num_prompts} prompts; give one number, or one per prompt"
        )
    return limits


def _listed(numbers: Any) -> Any:
    """Arrays and tensors as lists, which is faster than an index per entry."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers
