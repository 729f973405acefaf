"""The lossless speculative loop (laws 4.2, 4.4, 4.5): draft, verify, emit, until EOS or the length limit.

A round drafts at most min(max_draft_length, tokens left - 1) tokens, so that the token that every verification adds
still fits. The output has the distribution of the target alone under the same `Sampling`, for every drafter and policy.
"""

from collections.abc import Generator, Iterable, Sequence
from itertools import chain
from operator import index
from time import perf_counter
from typing import Any, SupportsIndex

import torch
from transformers import PreTrainedModel

from decode.loop.batch import Batch
from decode.loop.drafter import Drafter, ModelDrafter, Proposal
from decode.loop.models import cached
from decode.loop.rounds import Generation, Round, settle_round
from decode.loop.session import Session
from lm import CachedModel, FeatureModel, GreedySampler, RandomSampler, Sampler, Sampling
from lm.verification import node_probs, verify_rows, verify_tree

Ids = Iterable[SupportsIndex]
_TOKEN = "a token id of a prompt"


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
        drafter: proposes chains or trees.
        sampling: the one transform of draft and target (law 4.1).
        max_draft_length: maximum draft length in tokens, or levels of a tree.
        eos_ids: tokens that end a generation; None: those of the target; an empty set: none.
        vocab_size: `Pair.vocab_size` if logits are wider than the tokenizer.
        """
        if max_draft_length < 0:
            raise ValueError(f"max_draft_length is {max_draft_length}; it must be at least 0 (0 never drafts)")
        needs_trees = getattr(drafter, "drafts_trees", False)
        self.target: CachedModel = cached(target, drafter, vocab_size=vocab_size, holds_trees=needs_trees)
        self.drafter = drafter
        self.sampling = sampling or Sampling()
        self.max_draft_length = max_draft_length
        self.eos_ids = self.target.eos_ids if eos_ids is None else eos_ids

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
        """One generation per prompt, as `generate` makes it; arguments and errors are those of `batch`."""
        batch = self.batch(prompts, max_new_tokens, batch_size=batch_size, generator=generator)
        for _ in batch:
            pass
        return batch.generations

    def batch(
        self,
        prompts: Iterable[Ids],
        max_new_tokens: SupportsIndex | Iterable[SupportsIndex],
        *,
        batch_size: SupportsIndex = 16,
        generator: torch.Generator | Sequence[Sampler] | None = None,
    ) -> Batch:
        """Decode `batch_size` prompts at a time (law 4.13), round by round: iterate over it, once; then it has a
        generation per prompt. A prompt replaces a sequence that has ended.

        `max_new_tokens` is the limit of all prompts, or one for each. A `torch.Generator` seeds the draws of each
        in turn, whatever the batch size. ValueError as `generate`, for a drafter of several models, and for a
        model whose cache cannot roll back single sequences.
        """
        drafter = self._batch_drafter()
        [num_rows] = integers_of(batch_size, "batch_size")
        if num_rows < 1:
            raise ValueError(f"batch_size is {num_rows}; it must be at least 1")
        all_ids = [integers_of(ids, _TOKEN) for ids in prompts]
        limits = self._limits_of(max_new_tokens, all_ids)
        if generator is None or isinstance(generator, torch.Generator):
            generator = [RandomSampler(generator) for _ in all_ids]
        shared = Session(self.sampling, self.eos_ids, GreedySampler(), [*chain.from_iterable(all_ids)])
        for model, role in ((self.target, "target"), (drafter.model, "draft")):
            shared.check(model, role)  # the batch's self-check may use its cache
            if len({model.limit_of(len(ids)) for ids in all_ids}) > 1:
                raise ValueError(
                    f"prompts are on both sides of the length where the {role} changes its rotary frequencies "
                    f"(`lm.rope`), up to {max(map(len, all_ids))} tokens; decode the long ones apart"
                )
        requests = list(zip(all_ids, limits, generator, strict=True))
        return Batch(
            self.target,
            drafter,
            requests,
            num_rows=num_rows,
            session=shared,
            max_draft_length=self.max_draft_length,
        )

    def _batch_drafter(self) -> ModelDrafter:
        """The drafter; ValueError for another loop (PEARL), another drafter, or a draft that reads the target."""
        model = getattr(self.drafter, "model", self.drafter)
        is_plain = type(self) is SpeculativeDecoder
        if not is_plain or type(self.drafter) is not ModelDrafter or isinstance(model, FeatureModel):
            name = type(model if is_plain else self).__name__
            raise ValueError(
                f"a {name} drafts for one prompt at a time; use generate, or a ModelDrafter of a separate draft model"
            )
        return self.drafter

    def stream(
        self, prompt_ids: Ids, max_new_tokens: SupportsIndex, *, generator: torch.Generator | Sampler | None = None
    ) -> Generator[Round, None, None]:
        """Rounds, each as soon as it is verified. Only one stream may be open at a time. ValueError at the first round:
        no integers, an empty prompt, a text beyond the target's context, or models that `decode.loop.session` refuses.
        """
        committed = integers_of(prompt_ids, _TOKEN)
        [limit] = integers_of(max_new_tokens, "max_new_tokens")
        self._check(len(committed), limit)
        draws = RandomSampler(generator) if generator is None or isinstance(generator, torch.Generator) else generator
        with Session(self.sampling, self.eos_ids, draws, committed, limit) as session:
            session.take(self.target, "target", verifies=True)
            self.drafter.start(session)
            while len(committed) < session.num_tokens:
                round_ = self._round(committed, session.num_tokens - len(committed), session.draws)
                for model in session.models:
                    if isinstance(model, CachedModel):
                        model.forget(len(committed) - 1)
                yield round_
                if round_.emitted[-1] in self.eos_ids:
                    return

    def _limits_of(
        self, max_new_tokens: SupportsIndex | Iterable[SupportsIndex], prompts: Sequence[list[int]]
    ) -> list[int]:
        """The limit of each prompt; ValueError unless there is one for all or one for each, which its context holds."""
        limits = integers_of(max_new_tokens, "max_new_tokens")
        if len(limits) == 1:
            limits *= len(prompts)
        if len(limits) != len(prompts):
            raise ValueError(f"max_new_tokens has {len(limits)} entries for {len(prompts)} prompts; give 1 or as many")
        for ids, limit in zip(prompts, limits, strict=True):
            self._check(len(ids), limit)
        return limits

    def _check(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ValueError for a text that the target's context cannot hold; the last token is never fed."""
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
        clock_s = (started_s, drafted_s)
        return settle_round(
            committed, proposal, next_token, self.target, self.drafter, eos_ids=self.eos_ids, clock_s=clock_s
        )

    def _verify_chain(self, text: list[int], proposal: Proposal, draws: Sampler) -> int:
        """Law 4.2: sets the accepted tokens and returns the next one."""
        logits = self.target.feed(text[len(self.target) :] + proposal.tokens, len(proposal.tokens) + 1)
        p = self.sampling.dists(logits, text, proposal.tokens)
        [(num_accepted, next_token, probs)] = verify_rows([proposal.tokens], [proposal.dists], [p], [draws])
        proposal.set_accepted(num_accepted, probs)
        return next_token

    def _verify_tree(self, text: list[int], proposal: Proposal, draws: Sampler) -> int:
        """Law 4.2 with several candidates at each position."""
        tree = proposal.tree
        assert tree is not None
        logits = self.target.feed_tree(text[len(self.target) :], tree)
        if self.sampling.sees_no_tokens:
            p = self.sampling.dists(logits)
        else:
            paths = [[], *(tree.tokens_of(tree.path(node)) for node in range(len(tree)))]
            p = torch.cat([self.sampling.dists(row[None], text, path) for row, path in zip(logits, paths, strict=True)])
        proposal.accepted, next_token = verify_tree(tree, p, draws)
        if proposal.run.takes_feedback:
            proposal.acceptance_probs = node_probs(tree, proposal.best, p, draws)
        return next_token


def integers_of(values: Any, name: str) -> list[int]:
    """One integer or several, of Python, numpy or torch; `name` says in a ValueError what is none."""
    values = values.tolist() if hasattr(values, "tolist") else values  # faster than an index per entry
    integers = []
    for value in values if isinstance(values, Iterable) else [values]:
        try:
            integers.append(index(value))
        except TypeError:
            raise ValueError(f"{name} is {value!r} ({type(value).__name__}); it must be an integer") from None
    return integers
