"""Online features: the frozen draft runs over each batch of rows, once for all heads.

No hidden states are stored; the features equal cached ones up to the precision in which those are stored.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.store.rows import read_rows
from heads.batches.features import NO_RATE, RATE, TARGET_PROB, Batch, Features, FeatureShard, join
from heads.batches.module import FeatureData
from heads.batches.order import Item
from lm.forwards import chunk_rows, chunks, hidden_states, logits_of
from lm.signals import SCALARS, signals_of
from store.shards import list_shards

_CHUNK_MB = 64
"""Size of one float32 [tokens, vocabulary] chunk."""


class Row(NamedTuple):
    """One response with its labels."""

    prompt_ids: list[int]
    response_ids: list[int]
    draft_ids: list[int]
    acceptance_prob: list[float]
    log_p: list[float]
    acceptance_rate: list[float] | None
    """None for data of data.mode sequential."""
    from_target: list[list[bool]]
    """For each mixing, which tokens are the target's."""


def row_reader(paths: Sequence[Path], mixes: int) -> Callable[[Sequence[Item]], list[Row]]:
    """A function that reads responses of one split; it caches 16 shards."""
    table = lru_cache(16)(lambda shard: read_rows(paths[shard], Row._fields))

    def row(item: Item) -> Row:
        [values] = table(item.block.shard).slice(item.block.start + item.offset, 1).to_pylist()
        coins = values["from_target"]
        return Row(**values | {"from_target": coins if mixes > 1 else [coins]})

    return lambda items: list(map(row, items))


class RowData(FeatureData):
    """Batches of rows; `draft` computes their features inside the training step."""

    draft: "DraftFeatures"

    def first_scalars(self, timing: str) -> Float[Tensor, "tokens scalar"]:
        rows = next(iter(self.loader("train")))
        return self.draft(rows, self.draft.draft.device)[timing].columns(self.scalars)

    def _source(self, split: str) -> tuple[Callable[[Sequence[Item]], Any], list[list[int]]]:
        paths = list_shards(self.data.dir, split)
        return row_reader(paths, self.data.mixes), [_lengths(path) for path in paths]

    def _read(self, split: str) -> list[list[Path]]:
        return [list_shards(self.data.dir, split)]

    def _range_check(self) -> None:
        return None

    def _open(self, split: str) -> dict[str, list[FeatureShard]]:
        for path in list_shards(self.data.dir, split):
            if RATE in self.columns and read_rows(path, (RATE,)).column(0).null_count:
                raise ValueError(f"{path} {NO_RATE}")
        return {}

    def _width(self) -> int:
        return int(self.manifest["draft"]["hidden_size"])


class DraftFeatures:
    """Computes the features of rows with the frozen draft."""

    def __init__(self, draft: PreTrainedModel, *, vocab_size: int, timings: Sequence[str]) -> None:
        self.draft, self.vocab_size, self.timings = draft.eval().requires_grad_(False), vocab_size, timings

    @torch.no_grad()
    def __call__(self, rows: Sequence[Row], device: torch.device) -> Batch:
        """The features of some rows by timing, on `device`; moves the draft there."""
        self.draft.to(device)
        if not rows:
            return {timing: self._empty(device) for timing in self.timings}
        lengths = [len(row.response_ids) for row in rows]
        drawn, scalars = (part.split(lengths) for part in self._drawn(rows))
        batch = {}
        for timing in self.timings:
            # fed-time features have one sequence per mixing, drawn-time features one per response
            if timing == "fed":
                mixings = [(index, coins) for index, row in enumerate(rows) for coins in row.from_target]
                states: Sequence[Tensor] = self._fed([(rows[index], coins) for index, coins in mixings])
            else:
                mixings = [(index, [False] * length) for index, length in enumerate(lengths)]
                states = drawn
            parts = [
                _features(rows[index], hidden, scalars[index], coins=coins, device=device)
                for (index, coins), hidden in zip(mixings, states, strict=True)
            ]
            batch[timing] = join(parts)
        return batch

    def _empty(self, device: torch.device) -> Features:
        empty = torch.empty(0, device=device)
        hidden = empty.new_empty(0, self.draft.config.get_text_config().hidden_size, dtype=self.draft.dtype)
        return Features(hidden, dict.fromkeys((*SCALARS, RATE, TARGET_PROB), empty), empty, empty.long(), empty.long())

    def _drawn(self, rows: Sequence[Row]) -> tuple[Float[Tensor, "token hidden"], Float[Tensor, "token scalar"]]:
        """The states that the tokens were drawn from, and every scalar of the tokens, as `data_gen` computes them."""
        sequences = [row.prompt_ids + row.response_ids[:-1] for row in rows]
        hidden = hidden_states(self.draft, sequences, [len(row.prompt_ids) - 1 for row in rows])
        tokens = torch.tensor([token for row in rows for token in row.draft_ids], device=hidden.device)
        parts = []
        for chunk in chunks(len(hidden), chunk_rows(self.vocab_size, _CHUNK_MB)):
            logits = logits_of(self.draft, hidden[chunk], self.vocab_size).float()
            parts.append(torch.stack(list(signals_of(logits, tokens[chunk]).values()), -1))
        return hidden, torch.cat(parts)

    def _fed(self, mixings: Sequence[tuple[Row, list[bool]]]) -> Sequence[Tensor]:
        """The states after each token of each mixed sequence."""
        sequences = [
            row.prompt_ids
            + [x if coin else y for coin, x, y in zip(coins, row.response_ids, row.draft_ids, strict=True)]
            for row, coins in mixings
        ]
        hidden = hidden_states(self.draft, sequences, [len(row.prompt_ids) for row, _ in mixings])
        return hidden.split([len(coins) for _, coins in mixings])


def _lengths(path: Path) -> list[int]:
    """Tokens of each row of a shard, prompt included."""
    prompts, responses = (
        pc.list_value_length(column) for column in read_rows(path, ("prompt_ids", "response_ids")).columns
    )
    return pc.add(prompts, responses).to_pylist()  # type: ignore[no-any-return]


def _features(row: Row, hidden: Tensor, scalars: Tensor, *, coins: list[bool], device: torch.device) -> Features:
    """The drafted positions of one row."""
    drafted = torch.tensor([not coin for coin in coins])
    drafted_on_device = drafted.to(hidden.device)
    columns = dict(zip(SCALARS, scalars[drafted_on_device].to(device).unbind(-1), strict=True))
    columns[TARGET_PROB] = torch.tensor(row.log_p)[drafted].exp().clamp(max=1).to(device)
    if row.acceptance_rate is not None:
        columns[RATE] = torch.tensor(row.acceptance_rate)[drafted].to(device)
    return Features(
        hidden=hidden[drafted_on_device].to(device),
        scalars=columns,
        acceptance_prob=torch.tensor(row.acceptance_prob)[drafted].to(device),
        token=torch.tensor(row.draft_ids)[drafted].to(device),
        row_lengths=torch.tensor([int(drafted.sum())], device=device),
    )
