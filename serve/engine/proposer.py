"""vLLM's proposer of a draft model, with drafts that end request by request.

Four of its methods are overridden. `prepare_next_token_ids_padded` is where a step's verified tokens pass by; `propose`
drafts for the whole batch; `_sample_draft_tokens`, once per draft step, sees hidden states and logits of every row, and
leaves the loop once no row goes on. The first draft forward runs even where no row drafts, since it keeps the draft's
cache in step. The runner takes lists of lists for drafts, and cuts the draft's probabilities to their lengths.

The class is made from vLLM's own at run time, so that this file can be imported without vLLM; and a server that does
not ask for it loads nothing more of the project than this.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from serve import KEY


class _NoneGoesOnError(Exception):
    """Leaves vLLM's loop over draft steps."""


def stopping(base: type) -> type:
    """The proposer `base`, with drafts that end where policies say; without a configuration for them it is as it
    was.
    """

    class StoppingProposer(base):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
            super().__init__(vllm_config, device, runner)
            self._stops = None
            if KEY in (vllm_config.additional_config or {}):
                from serve.engine.stops import Stops

                self._stops = Stops(vllm_config, device, lambda tokens: self.model.embed_input_ids(tokens))

        def prepare_next_token_ids_padded(self, *step: Any) -> Any:
            if self._stops is not None:
                self._stops.verified(*step)
            return super().prepare_next_token_ids_padded(*step)

        def propose(self, num_speculative_tokens: int, *args: Any, **how: Any) -> Any:
            if self._stops is None:
                return super().propose(num_speculative_tokens, *args, **how)
            self._stops.begin(num_speculative_tokens)
            with suppress(_NoneGoesOnError):
                super().propose(num_speculative_tokens, *args, **how)
            self._last_draft_probs = self._stops.probs
            return self._stops.drafts

        def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> Any:
            stops = self._stops
            if stops is None:
                return super()._sample_draft_tokens(hidden_states, sampling_metadata)
            if not stops.is_going:
                raise _NoneGoesOnError
            logits = self.model.compute_logits(hidden_states)
            token, probs = self._sample_from_logits(logits.clone(), sampling_metadata)  # which scales them in place
            stops.step(logits, hidden_states, token, probs)
            if not stops.is_going:
                raise _NoneGoesOnError
            return token, probs

    return StoppingProposer
