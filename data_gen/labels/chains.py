"""Labels and features of a feature draft: heads on it learn from drafts, as decoding makes them.

From every position s of a response, or every n-th, the draft proposes a few tokens y, fed with the target's states up
to s and then with its own outputs (`lm.features.rollout`). The first step of each draft is teacher-forced; later steps
read the draft's own tokens, as in decoding. One forward of the target over all drafts of a response gives p along them.

    acceptance_prob(s, j) = min(1, p(y) / q(y))      both after prompt + X_<s + y_0 … y_{j-1}
    drawn-time state      that which produced q(s, j)
    fed-time state        that after y_j was fed

There is no token mixing, as the tokens before y_j are the draft's own. The rows hold the first step at each position,
also where no draft is stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.labels.laws import (
    NUMBERS_OF_BOTH,
    NUMBERS_OF_DRAFT,
    NUMBERS_OF_TARGET,
    acceptance_prob_of,
    label_draft,
    label_joint,
    label_target,
)
from data_gen.responses.exchange import Exchange, Progress
from lm import FeatureDraft, Sampling
from lm.batch import Continuations, check_branch_length, check_branches
from lm.features.dspark import DSpark
from lm.features.rollout import BlockRollouts, Rollouts, TargetOutputs, rollouts_of, run_target
from lm.forwards import chunk_rows, logits_of, output_device_of
from lm.sampling import REMEDY, NonFiniteError, refuse_non_finite

_DRAFTS_AT_ONCE = 128
"""Limits the attention mask of one forward."""
_WHERE = "along the drafts of the response"


class LabelledDrafts(NamedTuple):
    """The labels and states of the drafts of some responses."""

    rows: dict[str, Tensor]
    """Columns of the rows, [token]: the first step at each position."""
    columns: dict[str, Tensor]
    """[drafted token], draft by draft."""
    hidden: dict[str, Float[Tensor, "drafted hidden"]]
    """Hidden states by timing."""
    lengths: list[list[int]]
    """Lengths of the drafts of each response."""
    broken: Mapping[int, str] = MappingProxyType({})
    """Index of a response along which a model yields a non-finite number -> the reason; it has no labels here."""


@dataclass(frozen=True, kw_only=True)
class ChainLabeller:
    """Labels responses with drafts of a feature draft."""

    draft: FeatureDraft
    target: PreTrainedModel
    sampling: Sampling
    vocab_size: int
    eos_ids: frozenset[int]
    draft_length: int
    """Tokens of each draft, unless EOS or the end of the response or of a block comes before."""
    draft_every: int
    """Drafts start at every n-th position of a response, from its first on; those of blocks from its second on."""
    chunk_mb: int
    """Limit of one float32 [positions, vocabulary] chunk."""
    feature_dtype: torch.dtype

    def label(
        self,
        exchanges: Sequence[Exchange],
        uniform: Float[Tensor, "token step"],
        *,
        timings: Sequence[str],
        progress: Progress,
    ) -> LabelledDrafts:
        """The labels and states of every draft of some responses; tokens are drawn with `uniform`, in float64."""
        parts, lengths, start = [self._empty(timings)], [], 0
        broken: dict[int, str] = {}
        for row, exchange in enumerate(exchanges):
            end = start + len(exchange.response_ids)
            try:
                labelled = self._labelled(exchange, uniform[start:end], timings)
                parts += labelled
                lengths.append([length for part in labelled for length in part.lengths[0]])
            except NonFiniteError as error:
                broken[row] = str(error)
            start = end
            progress(1)
        rows, columns, hidden = (
            _concatenated([getattr(part, name) for part in parts]) for name in ("rows", "columns", "hidden")
        )
        return LabelledDrafts(rows, columns, hidden, lengths, broken)

    @torch.inference_mode()
    def _labelled(self, exchange: Exchange, uniform: Tensor, timings: Sequence[str]) -> list[LabelledDrafts]:
        """The drafts of one response, in groups that one forward of the target reads."""
        prompt, response = exchange.prompt_ids, exchange.response_ids
        ids = (prompt + response)[: max(len(prompt) + len(response) - 1, 1 + self.draft.lag)]
        check_branches(self.target)
        check_branch_length(self.target, len(ids) + self.draft_length, num_prompt=len(prompt))
        reading = run_target(self.target, self.draft, ids)
        chains = rollouts_of(self.draft, reading, ids)
        at_once = min(_DRAFTS_AT_ONCE, max(1, chunk_rows(self.vocab_size, self.chunk_mb) // self.draft_length))
        # a prompt of one token has no state of the target's for EAGLE to begin with: its first draft begins one token
        # later
        lengths = (torch.arange(len(response)) + len(prompt)).clamp(min=1 + self.draft.lag)
        # a fed-time state is that of the next position, which the last token of a block does not have
        longest = int(min(self.draft_length, chains.max_length - ("fed" in timings)))
        limits = torch.arange(len(response), 0, -1).clamp(max=longest)
        is_kept = torch.arange(len(response)) % self.draft_every == 0
        if isinstance(self.draft, DSpark):
            # DSpark was not trained on blocks that begin at a prompt's last token, and decoding makes none
            is_kept = is_kept.roll(1)
            is_kept[0] = False
        limits[~is_kept] = 1  # the rows need the first step of every position
        parts = []
        for group in torch.arange(len(response)).split(at_once):
            part = self._group(chains, reading, lengths[group], limits[group], uniform[group], timings=timings)
            parts.append(_selected(part, is_kept[group]))
        return parts

    def _group(
        self,
        chains: Rollouts | BlockRollouts,
        reading: TargetOutputs,
        begins: Tensor,
        limits: Tensor,
        uniform: Tensor,
        *,
        timings: Sequence[str],
    ) -> LabelledDrafts:
        """Some drafts of one response; `begins` is the committed length where each begins."""
        steps = _concatenated(self._steps(chains, begins, limits, uniform, is_fed="fed" in timings))
        order = steps["owner"].argsort(stable=True)  # stable: each draft keeps the order of its steps
        drafted = {name: values[order] for name, values in steps.items()}
        lengths = torch.bincount(drafted["owner"], minlength=len(begins))
        columns = {name: drafted[name] for name in ("draft_ids", *NUMBERS_OF_DRAFT)}
        p_logits = self._p_logits(reading, begins, columns["draft_ids"], lengths).to(columns["log_q"].device)
        columns["log_p"], p = label_target(p_logits, columns["draft_ids"], self.sampling)
        columns["acceptance_prob"] = acceptance_prob_of(columns["log_p"], columns["log_q"])
        columns |= label_joint(drafted["q"], p, q_logits=drafted["q_logits"], p_logits=p_logits)
        columns = {name: values.cpu() for name, values in columns.items()}
        firsts = (lengths.cumsum(0) - lengths).cpu()
        hidden = {timing: drafted[timing].to("cpu", self.feature_dtype) for timing in timings}
        if not all(states.isfinite().all() for states in hidden.values()):
            raise NonFiniteError(
                f"the draft has hidden states {_WHERE} that are not finite in {self.feature_dtype}; {REMEDY}"
            )
        return LabelledDrafts(
            {name: values[firsts] for name, values in columns.items()}, columns, hidden, [lengths.tolist()]
        )

    def _steps(
        self, chains: Rollouts | BlockRollouts, begins: Tensor, limits: Tensor, uniform: Tensor, *, is_fed: bool
    ) -> list[dict[str, Tensor]]:
        """The labels, q, q_logits, both states and `owner` (its drafts) of each step of the drafts.

        The last token of a draft is fed too if fed-time states are requested (`is_fed`).
        """
        state = chains.begin(begins)
        limits, alive, steps = limits.to(state.device), torch.arange(len(begins), device=state.device), []
        eos = torch.tensor(sorted(self.eos_ids), device=state.device)
        for index in range(self.draft_length):
            logits = self.draft.logits(state)[..., : self.vocab_size]
            refuse_non_finite(logits, "the draft", _WHERE)
            labels, q = label_draft(logits, uniform[alive.cpu(), index].to(state.device), self.sampling)
            continues = (limits[alive] > index + 1) & ~torch.isin(labels["draft_ids"], eos)
            fed = torch.zeros_like(state)
            if (feeding := torch.ones_like(continues) if is_fed else continues).any():
                fed[feeding] = chains.feed(labels["draft_ids"][feeding], alive[feeding])
            steps.append(labels | {"owner": alive, "q": q, "q_logits": logits, "drawn": state, "fed": fed})
            alive, state = alive[continues], fed[continues]
            if not len(alive):
                break
        return steps

    def _p_logits(
        self, reading: TargetOutputs, begins: Tensor, tokens: Tensor, lengths: Tensor
    ) -> Float[Tensor, "drafted vocab"]:
        """The target's logits for each drafted token, in one forward over all but the last of each draft."""
        device = output_device_of(self.target)
        begins, tokens, lengths = (values.to(device) for values in (begins, tokens, lengths))
        firsts = lengths.cumsum(0) - lengths
        owners = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        indices = torch.arange(len(tokens), device=device) - firsts[owners]
        hidden = reading.hidden.new_empty(len(tokens), reading.hidden.shape[-1]).to(device)
        hidden[firsts] = reading.hidden.to(device)[begins - 1]
        is_fed = indices < lengths[owners] - 1
        if is_fed.any():
            tree = Continuations(self.target, self.vocab_size, reading.cache, begins)
            hidden[is_fed.nonzero().squeeze(-1) + 1] = tree.feed(tokens[is_fed], owners[is_fed], indices[is_fed]).to(
                device
            )
            tree.drop()
        logits = logits_of(self.target, hidden, self.vocab_size)
        refuse_non_finite(logits, "the target", _WHERE)
        return logits

    def _empty(self, timings: Sequence[str]) -> LabelledDrafts:
        names = (*NUMBERS_OF_DRAFT, *NUMBERS_OF_TARGET, *NUMBERS_OF_BOTH)
        columns = {name: torch.empty(0) for name in names} | {"draft_ids": torch.empty(0, dtype=torch.int64)}
        none = torch.empty(0, self.draft.hidden_size, dtype=self.feature_dtype)
        return LabelledDrafts(columns, columns, dict.fromkeys(timings, none), [])


def _selected(labelled: LabelledDrafts, is_kept: Tensor) -> LabelledDrafts:
    """The labels of one response with all rows but only the drafts that `is_kept`, [draft], selects."""
    lengths = torch.tensor(labelled.lengths[0])
    is_token_kept = is_kept.repeat_interleave(lengths)
    columns, hidden = (
        {name: values[is_token_kept] for name, values in table.items()} for table in (labelled.columns, labelled.hidden)
    )
    return LabelledDrafts(labelled.rows, columns, hidden, [lengths[is_kept].tolist()])


def _concatenated(tables: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
