"""Online features: the frozen draft computes the hidden states of each batch, once for all heads.

Labels and scalars come from disk, as for cached features; the states equal stored ones up to the stored precision.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.store.rows import read_rows
from heads.batches.features import RATE, TARGET_PROB, Batch, Features, FeatureShard, Row, with_states
from heads.batches.loader import Item
from lm.forwards import hidden_states
from lm.signals import SCALARS

_IDS = ("prompt_ids", "response_ids")


class Response(NamedTuple):
    """One response with its labels."""

    prompt_ids: list[int]
    response_ids: list[int]
    rows: dict[str, list[Row]]
    """Feature set -> its rows, without hidden states."""


def response_reader(
    paths: Sequence[Path], shards: Sequence[FeatureShard]
) -> tuple[Callable[[Sequence[Item]], list[Response]], list[list[int]]]:
    """A function that reads responses of one split, caching 16 shards; and the tokens of each response of each shard,
    prompt included.
    """
    table = lru_cache(16)(lambda shard: read_rows(paths[shard], _IDS))

    def response(item: Item) -> Response:
        index = item.block.start + item.offset
        [ids] = table(item.block.shard).slice(index, 1).to_pylist()
        rows = shards[item.block.shard].read(index, index + 1)
        own_rows = {timing: part for timing, (part,) in rows.items()}
        return Response(ids["prompt_ids"], ids["response_ids"], own_rows)

    def lengths(path: Path) -> Any:
        return pc.add(*map(pc.list_value_length, read_rows(path, _IDS).columns)).to_pylist()

    return lambda items: list(map(response, items)), list(map(lengths, paths))


class DraftFeatures:
    """Computes the features of responses with the frozen draft."""

    def __init__(self, draft: PreTrainedModel, *, timings: Sequence[str]) -> None:
        self.draft, self.timings = draft.eval().requires_grad_(False), timings

    @torch.no_grad()
    def __call__(self, responses: Sequence[Response], device: torch.device) -> Batch:
        """The features of some responses by timing, on `device`; moves the draft there."""
        self.draft.to(device)
        return {timing: self._features(responses, timing, device) for timing in self.timings}

    def _features(self, responses: Sequence[Response], timing: str, device: torch.device) -> Features:
        pairs = [(response, row) for response in responses for row in response.rows[timing]]
        if not pairs:
            empty = torch.empty(0, device=device)
            hidden = empty.new_empty(0, self.draft.config.get_text_config().hidden_size, dtype=self.draft.dtype)
            numbers = dict.fromkeys((*SCALARS, RATE, TARGET_PROB), empty)
            return Features(hidden, numbers, empty, empty.long(), empty.long())
        is_fed = timing == "fed"
        # a fed-time state is that at the token itself; a drawn-time state is that of the position before
        read = [_mixed(*pair) if is_fed else pair[0].response_ids[:-1] for pair in pairs]
        sequences = [response.prompt_ids + ids for (response, _), ids in zip(pairs, read, strict=True)]
        starts = [len(response.prompt_ids) - (not is_fed) for response, _ in pairs]
        states = hidden_states(self.draft, sequences, starts)
        parts = states.split([len(response.response_ids) for response, _ in pairs])
        hidden = torch.cat([part[row.drafted.to(part.device)] for part, (_, row) in zip(parts, pairs, strict=True)])
        features = with_states([row for _, row in pairs], hidden)
        return apply_to_collection(features, Tensor, Tensor.to, device)  # type: ignore[no-any-return]


def _mixed(response: Response, row: Row) -> list[int]:
    """The mixed sequence Z: the draft's tokens at the drafted positions."""
    ids = torch.tensor(response.response_ids)
    ids[row.drafted] = row.numbers["token"].long()
    return ids.tolist()  # type: ignore[no-any-return]
