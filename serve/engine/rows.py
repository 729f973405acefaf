"""vLLM's batch as the rows of a round.

The runner requests drafts before it updates its records, so a request's record lacks the tokens that the step has just
sampled; they are counted here from the step's output.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lm import Sampling
from serve import KEY
from serve.lanes import RequestRow
from serve.settings import Policies


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
        policies: policies of the requests.
    """
    rows = []
    for index, tokens in enumerate(sampled):
        request = requests[batch.req_ids[index]]
        params = request.sampling_params
        emitted = [] if is_discarded[index] else [token for token in tokens if token >= 0]
        stop_ids = frozenset(params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids)
        num_left = num_left_of(request, int(batch.num_tokens_no_spec[index]) + len(emitted))
        has_ended = not emitted or not stop_ids.isdisjoint(emitted)
        rows.append(
            RequestRow(
                request=batch.req_ids[index],
                policy=policies.of_request((params.extra_args or {}).get(KEY), sampling_of(params)),
                verified=tuple(batch.spec_token_ids[index]),
                num_accepted=max(len(emitted) - 1, 0),
                room=0 if has_ended else max(num_left - 1, 0),
                stop_ids=stop_ids,
            )
        )
    return rows


def num_left_of(request: Any, num_tokens: int) -> int:
    """Tokens that a request may still generate if it has `num_tokens`, prompt included."""
    longest = request.sampling_params.max_tokens
    return 2**31 if longest is None else longest - (num_tokens - request.num_prompt_tokens)


def sampling_of(params: Any) -> Sampling:
    """A request's `SamplingParams` as a `Sampling`."""
    if params.temperature < 1e-5:  # vLLM's limit for greedy sampling
        return Sampling(temperature=0.0)
    return Sampling(
        params.temperature, params.top_k if params.top_k > 0 else None, params.top_p if params.top_p < 1 else None
    )
