"""What `decode bench` times: generations by three arms, and bare forwards.

Every arm writes the same number of tokens (EOS is switched off in all), and a time is wall clock around the whole generation, prompt
included.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies import FixedLength
from lm import CachedModel, CompiledModel, Pair, Sampling

Seconds = list[float]


class TalliedModel(CachedModel):
    """Also writes a `Call` for every forward into a log that both models share."""

    def __init__(self, name: str, pair: Pair, log: list["Call"]) -> None:
        self._name, self._log = name, list[Call]()  # a model that is tried out while it is made is no part of a generation
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


@dataclass
class Arms:
    """The ways of generating, on one pair."""

    pair: Pair
    num_tokens: int
    compiled: tuple[CompiledModel, CompiledModel] | None = None
    """Target and draft, compiled."""
    seed: int = field(default=0, init=False)

    def ours(self, prompt: list[int], k: int, sampling: Sampling) -> float:
        """Seconds of our loop with a fixed length; k = 0 never drafts."""
        return self._timed(self._decoder(k, sampling, is_compiled=False), prompt)

    def ours_compiled(self, prompt: list[int], k: int, sampling: Sampling) -> float:
        """The same with both models compiled."""
        return self._timed(self._decoder(k, sampling, is_compiled=True), prompt)

    def num_differing(self, prompts: Sequence[list[int]], k: int) -> int:
        """Greedy generations that the compiled loop ends with other tokens than the eager one: near ties that rounding decides."""
        greedy = Sampling(temperature=0.0)
        eager, compiled = (self._decoder(k, greedy, is_compiled=is_compiled) for is_compiled in (False, True))
        return sum(
            eager.generate(prompt, self.num_tokens).token_ids != compiled.generate(prompt, self.num_tokens).token_ids for prompt in prompts
        )

    def assisted(self, prompt: list[int], k: int, sampling: Sampling) -> float:
        """Seconds of transformers' assisted generation at the same fixed length; k = 0: its plain generation."""
        self.seed += 1
        torch.manual_seed(self.seed)
        assistant = {"assistant_model": self.pair.draft} if k else {}
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if not sampling.is_greedy else {"do_sample": False}
        ids = torch.tensor([prompt], device=self.pair.target.device)
        with _fixed_length(self.pair, k):
            started_s = perf_counter()
            output = self.pair.target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.num_tokens, **assistant, **how)  # type: ignore[operator]
            seconds = perf_counter() - started_s
        assert output.shape[1] == len(prompt) + self.num_tokens, "every arm writes the same number of tokens"
        return seconds

    def _decoder(self, k: int, sampling: Sampling, *, is_compiled: bool) -> SpeculativeDecoder:
        models = (
            self.compiled if is_compiled else [CachedModel(m, vocab_size=self.pair.vocab_size) for m in (self.pair.target, self.pair.draft)]
        )
        assert models is not None, "no compiled models were asked for"
        target, draft = models
        drafter = ModelDrafter(draft, FixedLength(k))
        return SpeculativeDecoder(target, drafter, sampling=sampling, max_draft_length=k, eos_ids=frozenset())

    def _timed(self, decoder: SpeculativeDecoder, prompt: list[int]) -> float:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        started_s = perf_counter()
        decoder.generate(prompt, self.num_tokens, generator=generator)
        return perf_counter() - started_s


class Outside(NamedTuple):
    """Time outside model forwards, medians over prompts."""

    share: float
    """1 - counts of forwards x bare forward medians / wall time. A bare forward is the transformers model called with its own cache on ids
    that are already a tensor; the loop calls the model's halves, which is faster, so this may be below zero."""
    own_share: float
    """The same with the loop's own forwards (`CachedModel`) in place of the bare ones."""
    wall_s: float


def outside_share(pair: Pair, prompts: Sequence[list[int]], k: int, sampling: Sampling, num_tokens: int) -> Outside:
    """What the loop spends outside forwards.

    Each generation is followed by its own forwards once more, bare and in their order, so that both see the same caches of the machine;
    medians are per model, tokens fed, and cache length to within 16.
    """
    log: list[Call] = []
    drafter = ModelDrafter(TalliedModel("draft", pair, log), FixedLength(k))
    decoder = SpeculativeDecoder(TalliedModel("target", pair, log), drafter, sampling=sampling, max_draft_length=k, eos_ids=frozenset())
    bare: dict[Call, Seconds] = defaultdict(list)
    own: dict[Call, Seconds] = defaultdict(list)
    runs = []
    for seed, prompt in enumerate([prompts[0], *prompts]):
        log.clear()
        generator = torch.Generator().manual_seed(seed)
        started_s = perf_counter()
        decoder.generate(prompt, num_tokens, generator=generator)
        runs.append((perf_counter() - started_s, [call.shape for call in log]))
        _repeat_bare(pair, log, bare)
        _repeat_own(pair, log, own)
    share, own_share = (
        median(1 - sum(median(seconds[shape]) for shape in shapes) / wall_s for wall_s, shapes in runs[1:]) for seconds in (bare, own)
    )
    return Outside(share, own_share, median(wall_s for wall_s, _ in runs[1:]))


@torch.inference_mode()
def _repeat_bare(pair: Pair, calls: Sequence[Call], bare: dict[Call, Seconds]) -> None:
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
def _repeat_own(pair: Pair, calls: Sequence[Call], own: dict[Call, Seconds]) -> None:
    """The same by the loop's own `CachedModel`s."""
    models = {name: CachedModel(getattr(pair, name), vocab_size=pair.vocab_size) for name in ("target", "draft")}
    for call in calls:
        model, ids = models[call.name], [5] * (call.length + call.num_fed)
        model.roll_back(call.length)
        started_s = perf_counter()
        model.forward(ids, call.num_rows)
        _wait(model.device)
        own[call.shape].append(perf_counter() - started_s)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _fixed_length(pair: Pair, k: int) -> Any:
    """transformers reads the assistant's settings from the draft's generation config only; EOS off in both models meanwhile."""
    changes = {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    wanted = [(pair.target, {"eos_token_id": None}), (pair.draft, {"eos_token_id": None, **changes})]
    before = [{name: getattr(model.generation_config, name, None) for name in values} for model, values in wanted]  # type: ignore[attr-defined]
    for model, values in wanted:
        model.generation_config.update(**values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for (model, _), values in zip(wanted, before, strict=True):
            model.generation_config.update(**values)


def timed_in_turns(arms: Sequence[Callable[[list[int]], float]], prompts: Sequence[list[int]]) -> list[Seconds]:
    """Seconds of each arm, prompt by prompt, the arms taking turns on every prompt; one unmeasured turn first."""
    for arm in arms:
        arm(prompts[0])
    return [list(column) for column in zip(*([arm(prompt) for arm in arms] for prompt in prompts), strict=True)]


def median_ratio(slower: Seconds, faster: Seconds) -> float:
    """How many times as fast, the median over prompts: a machine whose speed drifts slows both arms of a prompt alike."""
    return median(slow / fast for slow, fast in zip(slower, faster, strict=True))
