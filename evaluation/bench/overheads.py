"""What the loop spends outside model forwards.

outside_share     share of the wall time outside model forwards: 1 - (counts of forwards x bare forward medians) / wall
                  time;
                  outside_own_share: the same with the loop's own forwards, which are faster than bare ones
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies import FixedLength
from lm import CachedModel, Pair, Sampling

_DRAFT_LENGTH = 5
_OWN = "outside_own_share_"


def overheads_of(
    pair: Pair, prompts: Sequence[list[int]], samplings: Mapping[str, Sampling], *, num_tokens: int
) -> dict[str, Any]:
    """Time outside forwards with drafts of 5 tokens."""
    row: dict[str, Any] = {}
    for name, sampling in samplings.items():
        outside = outside_share(pair, prompts, _DRAFT_LENGTH, sampling, num_tokens)
        row |= {f"outside_{part}_{name}": value for part, value in outside.items()}
    return row


def overhead_verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The share of the loop's time outside its own forwards, in a sentence for each number of threads."""
    return "\n".join(
        f"With {row['threads']} thread{'s' * (row['threads'] > 1)} the loop spends outside its forwards "
        + " and ".join(
            f"{share:.1%} ({name.removeprefix(_OWN)})" for name, share in row.items() if name.startswith(_OWN)
        )
        + " of a generation."
        for row in rows
    )


class TalliedModel(CachedModel):
    """Also writes a `Call` for every forward into a log that both models share."""

    def __init__(self, name: str, pair: Pair, log: list["Call"]) -> None:
        # a model that is tried out while it is made is no part of a generation
        self._name, self._log = name, list[Call]()
        super().__init__(getattr(pair, name), vocab_size=pair.vocab_size)
        self._log = log

    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> torch.Tensor:
        self._log.append(Call(self._name, len(self), len(token_ids) - len(self), num_rows))
        return super().forward(token_ids, num_rows)

    def forward_drawn(self, token: torch.Tensor) -> torch.Tensor:
        self._log.append(Call(self._name, len(self), 1, 1))
        return super().forward_drawn(token)


class Call(NamedTuple):
    """One forward: which model, tokens in its cache, tokens fed, rows asked."""

    name: str
    length: int
    num_fed: int
    num_rows: int

    @property
    def shape(self) -> "Call":
        """The same, with the cache's length to within 16 tokens."""
        return self._replace(length=self.length // 16)


def outside_share(
    pair: Pair, prompts: Sequence[list[int]], k: int, sampling: Sampling, num_tokens: int
) -> dict[str, float]:
    """Share of the loop's time that is spent outside forwards: "share", "own_share" and "wall_s", the seconds of a
    whole generation, medians over prompts.

    "share" may be below zero: a bare forward is the transformers model called with its own cache on ids that are
    already a tensor, and the loop calls the model's halves, which is faster. "own_share" takes the loop's own forwards
    (`CachedModel`) in place of the bare ones.

    Each generation is followed by its own forwards once more, bare and in their order, so that both see the same caches
    of the machine; medians are per model, tokens fed, and cache length to within 16.
    """
    log: list[Call] = []
    drafter = ModelDrafter(TalliedModel("draft", pair, log), FixedLength(k))
    decoder = SpeculativeDecoder(
        TalliedModel("target", pair, log), drafter, sampling=sampling, max_draft_length=k, eos_ids=frozenset()
    )
    bare: dict[Call, list[float]] = defaultdict(list)
    own_s: dict[Call, list[float]] = defaultdict(list)
    runs = []
    for seed, prompt in enumerate([prompts[0], *prompts]):
        log.clear()
        generator = torch.Generator().manual_seed(seed)
        started_s = perf_counter()
        decoder.generate(prompt, num_tokens, generator=generator)
        runs.append((perf_counter() - started_s, [call.shape for call in log]))
        _repeat_bare(pair, log, bare)
        _repeat_own(pair, log, own_s)
    share, own_share = (
        median(1 - sum(median(seconds[shape]) for shape in shapes) / wall_s for wall_s, shapes in runs[1:])
        for seconds in (bare, own_s)
    )
    return {"share": share, "own_share": own_share, "wall_s": median(wall_s for wall_s, _ in runs[1:])}


@torch.inference_mode()
def _repeat_bare(pair: Pair, calls: Sequence[Call], bare: dict[Call, list[float]]) -> None:
    """Run the same forwards again and nothing else; adds the seconds of each to `bare`."""
    caches = {name: DynamicCache(config=getattr(pair, name).config) for name in ("target", "draft")}
    for call in calls:
        model, cache = getattr(pair, call.name), caches[call.name]
        cache.crop(min(call.length - cache.get_seq_length(), 0))
        ids = torch.full((1, call.num_fed), 5, device=model.device)
        started_s = perf_counter()
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=call.num_rows)
        _wait(model.device)
        bare[call.shape].append(perf_counter() - started_s)


@torch.inference_mode()
def _repeat_own(pair: Pair, calls: Sequence[Call], cached_s: dict[Call, list[float]]) -> None:
    """The same by the loop's own `CachedModel`s."""
    models = {name: CachedModel(getattr(pair, name), vocab_size=pair.vocab_size) for name in ("target", "draft")}
    for call in calls:
        model, ids = models[call.name], [5] * (call.length + call.num_fed)
        model.roll_back(call.length)
        started_s = perf_counter()
        model.forward(ids, call.num_rows)
        _wait(model.device)
        cached_s[call.shape].append(perf_counter() - started_s)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
