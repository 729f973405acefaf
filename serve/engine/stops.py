"""The policies of vLLM's proposer: the requests of its batch and their drafts in the current round."""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from decode.loop.signals import BatchSignals
from serve.engine import cpu
from serve.engine.policies import policies_of
from serve.engine.rows import rows_of
from serve.lanes import Lanes, RequestRow


class Stops:
    """Reads every step of vLLM's draft loop; decides when it ends and which tokens are drafts."""

    def __init__(self, config: Any, device: torch.device, embedding: Callable[[Tensor], Tensor]) -> None:
        """Args:
        config: a `VllmConfig`.
        device: device of the draft.
        embedding: token ids -> the draft's input embeddings.
        """
        self._policies = policies_of(config)
        for head in self._policies.heads:
            head.to(device)
        if device.type == "cpu":
            cpu.mend()
        self._lanes, self._signals = Lanes(), BatchSignals(embedding)
        self._rows: list[RequestRow] = []
        self._alive: Container[str] = ()

    def verified(self, sampled: Tensor, requests: dict[str, Any], batch: Any, is_discarded: Tensor) -> None:
        """Record a step of the target; arguments as in vLLM's `prepare_next_token_ids_padded`."""
        self._rows = rows_of(sampled.tolist(), requests, batch, is_discarded.tolist(), self._policies)
        self._alive = requests

    def begin(self, longest: int) -> None:
        """Begin a round of at most `longest` tokens."""
        self._position, self._probs = 0, list[Tensor]()
        self._lanes.begin([row._replace(room=min(row.room, longest)) for row in self._rows], self._alive)

    @property
    def is_going(self) -> bool:
        """Whether any request continues to draft."""
        return self._lanes.is_going

    def step(self, logits: Tensor, hidden: Tensor, token: Tensor, probs: Tensor | None) -> None:
        """Record a draft step.

        Args:
            logits: the draft's unscaled logits [rows, vocab].
            hidden: the hidden states [rows, hidden] that gave them.
            token: drafted tokens [rows].
            probs: probabilities [rows, vocab] that they were sampled from; None: greedy.
        """
        tokens, signals = self._signals.read(self._position, logits, hidden, token, policies=self._lanes.policies)
        self._position += 1
        if probs is not None:
            self._probs.append(probs)
        self._lanes.step(tokens, signals)

    @property
    def drafts(self) -> list[list[int]]:
        """Draft of each request."""
        return self._lanes.drafts

    @property
    def probs(self) -> Tensor | None:
        """Probabilities that the drafted tokens were sampled from, [rows, steps, vocab]."""
        return torch.stack(self._probs, dim=1).contiguous() if self._probs else None
