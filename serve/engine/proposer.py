"""vLLM's proposer for a draft model, with a draft length per request. It overrides:

    prepare_next_token_ids_padded    reads the tokens that the target has just verified
    propose                          drafts for the whole batch; returns lists, to whose lengths the runner cuts the
                                     draft's probabilities
    _sample_draft_tokens             reads each draft step's states and logits; ends the loop once no row continues

The first draft forward always runs, because it updates the draft's cache. The class is derived at run time, so that
this file can be imported without vLLM, and a server without the plugin's settings imports nothing else of the project.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from serve import KEY


class _AllRowsStoppedError(Exception):
    """Ends vLLM's loop over draft steps."""


def stopping(base: type) -> type:
    """The proposer class `base` with stopping policies; unchanged if the configuration has none."""

    class StoppingProposer(base):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, device: torch.device, runner: object = None) -> None:
            super().__init__(vllm_config, device, runner)
            self._stops = None
            if KEY in (vllm_config.additional_config or {}):
                from serve.engine.stops import Stops

                self._stops = Stops(vllm_config, device, lambda tokens: self.model.embed_input_ids(tokens))

        def prepare_next_token_ids_padded(self, *step: Any) -> object:
            if self._stops is not None:
                self._stops.verified(*step)
            return super().prepare_next_token_ids_padded(*step)

        def propose(self, num_speculative_tokens: int, *args: object, **kwargs: object) -> object:
            if self._stops is None:
                return super().propose(num_speculative_tokens, *args, **kwargs)
            self._stops.begin(num_speculative_tokens)
            with suppress(_AllRowsStoppedError):
                super().propose(num_speculative_tokens, *args, **kwargs)
            self._last_draft_probs = self._stops.probs
            return self._stops.lanes.drafts

        def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: object) -> object:
            stops = self._stops
            if stops is None:
                return super()._sample_draft_tokens(hidden_states, sampling_metadata)
            if not stops.lanes.is_going:
                raise _AllRowsStoppedError
            logits = self.model.compute_logits(hidden_states)
            token, probs = self._sample_from_logits(logits.clone(), sampling_metadata)  # it scales its input in place
            stops.step(logits, hidden_states, token, probs)
            if not stops.lanes.is_going:
                raise _AllRowsStoppedError
            return token, probs

    return StoppingProposer
