"""Labels and features of exchanges: the forwards of law 4.6 over one shard.

A forward over prompt + X_<n gives, from position len(prompt) - 1 on, the n states that produce q_1 … q_n (or p_1 …
p_n): all labels and the drawn-time features in one pass per model. Fed-time features need one more draft forward per
mixing, over prompt + Z.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.labels.laws import acceptance_prob_of, label_draft, label_joint, label_served, label_target
from data_gen.responses.exchange import Exchange, Progress
from data_gen.store.labels import layout_of
from lm import Sampling, forwards
from lm.forwards import refuse_training
from lm.sampling import REMEDY, non_finite

_CACHED_MB = 1
"""A chunk of this size fits the cache of a CPU core: labelling 4,096 ids took 1.3 s, and 2.2 s in chunks of 64 MB."""
_FEWEST_ROWS = 32
"""Fewer rows than this make the product with the output layer slow."""
_BROKEN = "has NaN or infinite logits"


class Labelled(NamedTuple):
    """The labels of a shard, and its broken rows."""

    columns: dict[str, Tensor]
    """[token] of all rows; values of broken rows are meaningless."""
    broken: dict[int, str]
    """Row where a model yields a non-finite number -> the reason."""


@dataclass(frozen=True, kw_only=True)
class Labeller:
    """Labels a shard with the draft, the target or both."""

    draft: PreTrainedModel | None
    """None when only the target is loaded (`mode: sequential`, last stage)."""
    target: PreTrainedModel | None
    """None when only the draft is loaded."""
    sampling: Sampling
    vocab_size: int
    batch_size: int
    chunk_mb: int
    """Limit of one float32 [positions, vocabulary] chunk."""
    feature_dtype: torch.dtype

    def label(
        self, exchanges: Sequence[Exchange], inputs: Mapping[str, Tensor], *, with_hidden: bool, progress: Progress
    ) -> Labelled:
        """The columns of the loaded models, each [token]; with the draft also `drawn` [token, hidden] on request.

        `inputs`: `uniform` [token] to draw Y with, or `draft_ids` if Y is known; without the draft also `log_q`.
        Optional: `target_states` [token, hidden], which replace the target's forward; `p_ids` and `p_probs` [token,
        support], a server's distributions, which replace the target. ValueError if a model is in train mode.
        """
        for model in (self.draft, self.target):
            if model is not None:
                refuse_training(model)
        layout = layout_of(exchanges)
        costs = [len(exchange.prompt_ids) + len(exchange.response_ids) for exchange in exchanges]
        columns: dict[str, Tensor] = {} if exchanges else self._label_states(self._no_states(), inputs, with_hidden)
        for rows in forwards.alike(costs, self.batch_size):
            positions = layout.positions(rows)
            known = {name: value[positions] for name, value in inputs.items()}
            part = self._label_batch([exchanges[row] for row in rows], known, with_hidden)
            for name, values in part.items():
                columns.setdefault(name, values.new_empty(layout.num_tokens, *values.shape[1:]))[positions] = values
            progress(len(rows))
        broken: dict[int, str] = {}
        for name in ("draft", "target"):
            first_of = layout.rows_with(columns.pop(f"{name} {_BROKEN}")) if f"{name} {_BROKEN}" in columns else {}
            reason = f"the {name} {_BROKEN} at token {{}} of the response; {REMEDY}"
            broken = {row: reason.format(token) for row, token in first_of.items()} | broken
        return Labelled(columns, broken)

    def _no_states(self) -> dict[str, Tensor]:
        """The hidden states of no positions, which give empty columns of the right types."""
        models = {"draft": self.draft, "target": self.target}
        return {
            name: torch.empty(0, model.config.get_text_config().hidden_size, dtype=model.dtype).to(
                forwards.output_device_of(model)
            )
            for name, model in models.items()
            if model is not None
        }

    def fed_hidden(self, exchanges: Sequence[Exchange], mixed_ids: Tensor, *, mixes: int) -> Tensor:
        """Draft states after each token of `mixed_ids` (Z, in the order of `Layout.order`) was fed, [token, hidden]."""
        assert self.draft is not None
        layout = layout_of(exchanges).repeated(mixes)
        prompts = [exchange.prompt_ids for exchange in exchanges for _ in range(mixes)]
        sequences = [
            prompts[row] + mixed_ids[layout.offsets[row] : layout.offsets[row + 1]].tolist()
            for row in range(len(prompts))
        ]
        hidden: Tensor | None = None
        for rows in forwards.alike([len(sequence) for sequence in sequences], self.batch_size):
            # After token i was fed the state is at token i itself, one position later than the state that produced q_i.
            part = forwards.hidden_states(
                self.draft, [sequences[row] for row in rows], [len(prompts[row]) for row in rows]
            )
            part = part.to("cpu", self.feature_dtype)
            hidden = part.new_empty(layout.num_tokens, part.shape[-1]) if hidden is None else hidden
            hidden[layout.positions(rows)] = part
        return self._no_states()["draft"].to("cpu", self.feature_dtype) if hidden is None else hidden

    @torch.inference_mode()
    def _label_batch(
        self, exchanges: Sequence[Exchange], inputs: Mapping[str, Tensor], with_hidden: bool
    ) -> dict[str, Tensor]:
        sequences = [exchange.prompt_ids + exchange.response_ids[:-1] for exchange in exchanges]
        # the prompt's last token predicts the first of the response
        starts = [len(exchange.prompt_ids) - 1 for exchange in exchanges]
        states = {
            name: forwards.hidden_states(model, sequences, starts)
            for name, model in (("draft", self.draft), ("target", self.target))
            if model is not None and f"{name}_states" not in inputs
        }
        if self.target is not None and "target_states" in inputs:
            states["target"] = inputs["target_states"].to(forwards.output_device_of(self.target))
        return self._label_states(states, inputs, with_hidden)

    @torch.inference_mode()
    def _label_states(
        self, states: Mapping[str, Tensor], inputs: Mapping[str, Tensor], with_hidden: bool
    ) -> dict[str, Tensor]:
        """The columns of some positions, in chunks of them."""
        parts = [
            self._label_chunk(
                {name: hidden[chunk] for name, hidden in states.items()},
                {name: value[chunk] for name, value in inputs.items()},
            )
            for chunk in forwards.chunks(max(1, len(next(iter(states.values())))), self._chunk_rows())
        ]
        columns = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        if with_hidden and "draft" in states:
            columns["drawn"] = states["draft"].to("cpu", self.feature_dtype)
        return columns

    def _chunk_rows(self) -> int:
        """Positions per chunk: those that fit `chunk_mb`, on a CPU also its caches, as every label reads them again."""
        size = forwards.chunk_rows(self.vocab_size, self.chunk_mb)
        device = forwards.output_device_of(next(model for model in (self.draft, self.target) if model is not None))
        cached = max(_FEWEST_ROWS, forwards.chunk_rows(self.vocab_size, _CACHED_MB))
        return min(size, cached) if device.type == "cpu" else size

    def _label_chunk(self, states: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns of one chunk; only here does a [positions, vocabulary] matrix exist."""
        columns: dict[str, Tensor] = {}
        draft_ids, log_q = inputs.get("draft_ids"), inputs.get("log_q")
        if self.draft is not None:
            q_logits, columns[f"draft {_BROKEN}"] = self._logits(self.draft, states["draft"])
            labels, q = label_draft(q_logits, inputs.get("uniform"), self.sampling, draft_ids)
            columns |= labels
            draft_ids, log_q = labels["draft_ids"], labels["log_q"]
            if "p_ids" in inputs:
                columns |= label_served(q, inputs["p_ids"], inputs["p_probs"], labels=labels)
        if self.target is not None:
            assert draft_ids is not None, "without the draft, its labels come from the previous stage"
            assert log_q is not None
            p_logits, columns[f"target {_BROKEN}"] = self._logits(self.target, states["target"])
            if self.draft is not None:  # only joint labels need both distributions on one device
                p_logits = p_logits.to(q_logits.device)
            columns["log_p"], p = label_target(p_logits, draft_ids.to(p_logits.device), self.sampling)
            columns["acceptance_prob"] = acceptance_prob_of(columns["log_p"], log_q.to(p_logits.device))
        if self.draft is not None and self.target is not None:
            columns |= label_joint(q, p, q_logits=q_logits, p_logits=p_logits)
        return columns

    def _logits(self, model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over the tokenizer's ids, and [position] whether they are not finite; those become 0."""
        logits = forwards.logits_of(model, hidden, self.vocab_size)
        broken = non_finite(logits)
        return (logits.masked_fill(broken.unsqueeze(-1), 0) if broken.any() else logits), broken
