"""The policies of vLLM's proposer: the requests of its batch and their drafts in the current round.

The runner requests drafts before it updates its records, so a request's record lacks the tokens that the step has
just sampled; they are counted here from the step's output.
"""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema import ModelSource
from data_gen.store.manifest import describe_model
from decode.loop.step import DraftSteps
from lm import Sampling
from lm.signals import Normalised
from serve import KEY
from serve.engine import cpu
from serve.lanes import Lanes, RequestRow
from serve.settings import Policies, Settings


class Stops:
    """Reads every step of vLLM's draft loop; decides when it ends and which tokens are drafts."""

    def __init__(self, config: object, device: torch.device, embedding: Callable[[Tensor], Tensor]) -> None:
        """Args:
        config: a `VllmConfig`.
        device: device of the draft.
        embedding: token ids -> the draft's input embeddings.
        """
        self._policies = policies_of(config)
        for head in self._policies.heads.values():
            head.to(device)
        if device.type == "cpu":
            cpu.mend()
        self.lanes = Lanes()
        self._steps = DraftSteps(embedding)
        self._rows: list[RequestRow] = []
        self._alive: Container[str] = ()

    def verified(self, sampled: Tensor, requests: Mapping[str, object], batch: object, is_discarded: Tensor) -> None:
        """Record a step of the target; arguments as in vLLM's `prepare_next_token_ids_padded`."""
        self._rows = rows_of(sampled.tolist(), requests, batch, is_discarded.tolist(), self._policies)
        self._alive = requests

    def begin(self, longest: int) -> None:
        """Begin a round of at most `longest` tokens."""
        self._position = 0
        self._probs: list[Tensor] = []
        self.lanes.begin([row._replace(room=min(row.room, longest)) for row in self._rows], self._alive)

    def step(self, logits: Tensor, hidden: Tensor, token: Tensor, probs: Tensor | None) -> None:
        """Record a draft step: unscaled logits [rows, vocab], the hidden states [rows, hidden] that gave them,
        drafted tokens [rows], and the probabilities [rows, vocab] that these were sampled from (None: greedy).
        """
        tokens, signals = self._steps.read(
            self._position,
            Normalised(logits),
            hidden,
            token,
            policies=self.lanes.policies,
            nums_before=[row.num_before for row in self._rows],
        )
        self._position += 1
        if probs is not None:
            self._probs.append(probs)
        self.lanes.step(tokens, signals)

    @property
    def probs(self) -> Tensor | None:
        """Probabilities that the drafted tokens were sampled from, [rows, steps, vocab]."""
        return torch.stack(self._probs, dim=1).contiguous() if self._probs else None


def policies_of(config: Any) -> Policies:
    """The policies of a `VllmConfig`.

    Raises:
        ValueError: invalid settings, or heads that do not fit.
        FileNotFoundError: no exported head at a path.
    """
    drafting = config.speculative_config
    warn = logging.getLogger("vllm." + KEY).warning  # a child of vLLM's logger, which has its handlers
    if drafting.draft_sample_method == "greedy":
        warn(
            '%s: draft_sample_method is greedy, which lowers acceptance at temperature > 0; set "draft_sample_method": '
            '"probabilistic" in --speculative-config',
            KEY,
        )
    return Policies(
        Settings.parsed(config.additional_config[KEY]),
        hidden_size=drafting.draft_model_config.get_hidden_size(),
        draft=_description(drafting.draft_model_config, "--speculative-config's model"),
        target=_description(config.model_config, "--model"),
        warn=warn,
    )


def _description(model: Any, role: str) -> Callable[[], dict[str, object]]:
    source = ModelSource(path=model.model, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return lambda: {"role": role, "path": model.model, **describe_model(source)}


def rows_of(
    sampled: Sequence[Sequence[int]],
    requests: Mapping[str, Any],
    batch: Any,
    is_discarded: Sequence[bool],
    policies: Policies,
) -> list[RequestRow]:
    """One row for each request of the batch.

    Args:
        sampled: tokens of each row after verification, padded with -1.
        requests: the runner's `CachedRequestState` by id.
        batch: the runner's `InputBatch`.
        is_discarded: whether a row still processes its prompt; its sampled tokens are ignored.
        policies: the server's.
    """
    rows = []
    for index, tokens in enumerate(sampled):
        request = requests[batch.req_ids[index]]
        params = request.sampling_params
        emitted = [] if is_discarded[index] else [token for token in tokens if token >= 0]
        stop_ids = frozenset(params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids)
        num_new = int(batch.num_tokens_no_spec[index]) + len(emitted) - request.num_prompt_tokens
        num_left = 2**31 if params.max_tokens is None else params.max_tokens - num_new
        has_ended = not emitted or not stop_ids.isdisjoint(emitted)
        rows.append(
            RequestRow(
                request=batch.req_ids[index],
                policy=policies.of_request((params.extra_args or {}).get(KEY), sampling_of(params)),
                verified=tuple(batch.spec_token_ids[index]),
                num_accepted=max(len(emitted) - 1, 0),
                room=0 if has_ended else max(num_left - 1, 0),
                stop_ids=stop_ids,
                num_before=num_new,
            )
        )
    return rows


def sampling_of(params: Any) -> Sampling:
    """A request's `SamplingParams` as a `Sampling`."""
    if params.temperature < 1e-5:  # vLLM's limit for greedy sampling
        return Sampling(temperature=0.0)
    return Sampling(
        params.temperature, params.top_k if params.top_k > 0 else None, params.top_p if params.top_p < 1 else None
    )
