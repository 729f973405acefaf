"""Labels of exchanges: the forwards of law 4.6 over one shard.

A forward over prompt + X_<n gives, from position len(prompt) - 1 on, the n states that produce q_1 … q_n (or p_1
… p_n), and so all labels in one pass per model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.labels.laws import label_draft, label_target
from data_gen.responses.exchange import Exchange, Progress
from data_gen.store.rows import Layout, layout_of
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
    """[token] of all rows, where values of broken rows are meaningless; [drafted token] of a feature draft."""
    broken: dict[int, str]
    """Row where a model yields a non-finite number -> the reason."""
    of_rows: dict[str, Tensor] | None = None
    """Of a feature draft: the columns of the rows, [token], the first step at each position."""
    layout: Layout | None = None
    """Of a feature draft: drafted tokens of each response."""


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

    def label(self, exchanges: Sequence[Exchange], inputs: Mapping[str, Tensor], *, progress: Progress) -> Labelled:
        """The columns of the loaded models, each [token].

        `inputs`: `uniform` [token] to draw Y with, or `draft_ids` if Y is known; without the draft also `log_q`.
        Optional: `target_states` [token, hidden], which replace the target's forward; `p_ids` and `p_probs`
        [token, support], a server's distributions, which replace the target. ValueError if a model is in train
        mode.
        """
        for model in self._models.values():
            refuse_training(model)
        layout = layout_of(exchanges)

        costs = [len(exchange.prompt_ids) + len(exchange.response_ids) for exchange in exchanges]
        columns: dict[str, Tensor] = {}
        for rows in forwards.alike(costs, self.batch_size) or [[]]:  # an empty shard has one batch
            positions = layout.positions(rows)
            known = {name: value[positions] for name, value in inputs.items()}
            for name, values in self._label_batch([exchanges[row] for row in rows], known).items():
                columns.setdefault(name, values.new_empty(layout.num_tokens))[positions] = values
            progress(len(rows))
        broken: dict[int, str] = {}
        for name in self._models:
            first_of = layout.rows_with(columns.pop(f"{name} {_BROKEN}"))
            reason = f"the {name} {_BROKEN} at token {{}} of the response; {REMEDY}"
            broken = {row: reason.format(token) for row, token in first_of.items()} | broken
        return Labelled(columns, broken)

    @property
    def _models(self) -> dict[str, PreTrainedModel]:
        models = {"draft": self.draft, "target": self.target}
        return {name: model for name, model in models.items() if model is not None}

    @torch.inference_mode()
    def _label_batch(self, exchanges: Sequence[Exchange], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The columns of some rows, in chunks of positions."""
        sequences = [exchange.prompt_ids + exchange.response_ids[:-1] for exchange in exchanges]
        # the prompt's last token predicts the first of the response
        starts = [len(exchange.prompt_ids) - 1 for exchange in exchanges]
        states = {
            name: inputs["target_states"].to(forwards.output_device_of(model))
            if name == "target" and "target_states" in inputs
            else _states(model, sequences, starts)
            for name, model in self._models.items()
        }
        parts = []
        num_rows = max(1, len(next(iter(states.values()))))
        for chunk in forwards.chunks(num_rows, self._chunk_rows()):
            of_states = {name: hidden[chunk] for name, hidden in states.items()}
            of_inputs = {name: value[chunk] for name, value in inputs.items()}
            parts.append(self._label_chunk(of_states, of_inputs))
        return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}

    def _chunk_rows(self) -> int:
        """Positions per chunk: those that fit `chunk_mb`, on a CPU also its caches, as every label reads them again."""
        size = forwards.chunk_rows(self.vocab_size, self.chunk_mb)
        cached = max(_FEWEST_ROWS, forwards.chunk_rows(self.vocab_size, _CACHED_MB))
        device = forwards.output_device_of(next(iter(self._models.values())))
        return min(size, cached) if device.type == "cpu" else size

    def _label_chunk(self, states: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns of one chunk; only here does a [positions, vocabulary] matrix exist."""
        columns: dict[str, Tensor] = {}
        logits = dict[str, Tensor]()
        known = dict(inputs)
        q = None
        for name, model in self._models.items():
            logits[name], columns[f"{name} {_BROKEN}"] = self._logits(model, states[name])
        if self.draft is not None:
            labels, q = label_draft(logits["draft"], inputs.get("uniform"), self.sampling, inputs.get("draft_ids"))
            columns |= labels
            known = labels
        if "p_ids" in inputs:
            assert q is not None
            p = torch.zeros_like(q).scatter_add_(
                -1, inputs["p_ids"].to(q.device, torch.int64), inputs["p_probs"].to(q.device, q.dtype)
            )
            return columns | label_target(p, known, q)
        if self.target is None:
            return columns
        p_logits = logits["target"] if q is None else logits["target"].to(q.device)
        p = self.sampling.probs(p_logits.float())
        known = {name: known[name].to(p.device) for name in ("draft_ids", "log_q")}
        return columns | label_target(p, known, q, q_logits=logits.get("draft"), p_logits=p_logits)

    def _logits(self, model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over the tokenizer's ids, and [position] whether they are not finite; those become 0."""
        logits = forwards.logits_of(model, hidden, self.vocab_size)
        broken = non_finite(logits)
        return (logits.masked_fill(broken.unsqueeze(-1), 0) if broken.any() else logits), broken


def _states(model: PreTrainedModel, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """`forwards.hidden_states`, also of no sequence."""
    if sequences:
        return forwards.hidden_states(model, sequences, starts)
    width = model.config.get_text_config().hidden_size
    device = forwards.output_device_of(model)
    return torch.empty(0, width, dtype=model.dtype, device=device)
