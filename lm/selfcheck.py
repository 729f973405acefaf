"""Tests of a model against itself, once per model: fed in an unusual way, it must give the logits of a plain forward.

Some families' forwards ignore a cache (RWKV) or need another one (xLSTM), some of several tokens are not the
forwards of each (Mamba, Zamba2), some read positions off the mask (ALiBi). Such a model would silently decode
other tokens. So each way to feed has a plan, which is compared with plain forwards.

The error of a row is its largest difference, as a share of the row's standard deviation over the vocabulary. Limits:

                                            every row    median row of each feed
    float32, float64                             2e-4
    float32 products rounded to TF32             2e-2
    half precision, chains                                   0.2
                    with recurrent states        0.5
                    trees, batches, branches     0.5         0.2

A float64 model's float32 parts leave 5e-5; Zamba2's two forwards differ by 5e-4 to 4e-2. In half precision single
rows may choose other experts of a mixture, and a wrong cache leaves 0.3 and more; recurrent states recover from a
wrong feed; trees, batches and branches have few rows.

Rounding may fail the first text, so a second one is tried. Experts rarely tie in both texts. And only the first text
has reserved tokens, whose logits are noisy: in bfloat16 SmolLM2-135M's differ by 0.22 to 1.2 there, by 0.17 on words.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lm.forwards import device_of
from lm.masks import Tree

Limits = tuple[float, float]  # the largest error of a row, and of the median row of a feed
_EXACT = (2e-4, math.inf)
_TF32 = (2e-2, math.inf)
# in half precision
_CHAINS = (math.inf, 0.2)
_STATES = (0.5, math.inf)
_FEW_ROWS = (0.5, 0.2)
_NUM_MEDIAN_ROWS = 5  # rows of the shortest feed that has its own median; all shorter feeds share one
_CHAIN_LENGTH = 150  # tokens of the text, if the context has room for them
# (length to roll back to, length to feed up to), one after the other; tokens that are rolled back were wrong
# ones. The rest of the text comes last: at once, or one by one into a model with recurrent states, whose single
# steps and longer feeds are two different computations.
_CHAIN = (
    *((0, 30), (30, 31), (31, 32), (32, 53), (40, 41), (41, 43)),
    *((43, 64), (60, 81), (81, 102), (81, 82), (82, 103), (103, 104)),
)
_STEPWISE_LENGTH = 64  # tokens of the text that are fed again one at a time if longer feeds are wrong
_FIRST_WORD = 300  # ids below may be control tokens or single bytes, which come first in many vocabularies
_TREE_TEXT = (1, 2, 3)
_TREE = Tree((1, 2, 3, 1, 2), (-1, -1, 0, 1, 3))
# feeds of two rows: (length to roll back to, text) of each
_BATCH = (
    ((0, (1, 2, 3)), (0, (2, 1))),
    ((3, (1, 2, 3, 1)), (1, (2, 3, 1, 3))),
    ((2, (1, 2, 1)), (4, (2, 3, 1, 3, 1, 2))),
)
# an indexer of h heads scores a key exactly 0 with probability 2^-h: with so many heads no two keys of a row tie
_MIN_INDEXER_HEADS = 16

# for each way to feed that a model passed: whether it needs one token at a time
_PASSED: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()
Refusal = Callable[[str], ValueError]
Cached = Any  # a `CachedModel`, whose module imports this one
BatchClass = Callable[[Cached, int], Cached]  # `BatchModel`
Rows = Float[Tensor, "row width"]
Feeds = Iterable[tuple[Rows, Rows]]  # (rows of a feed, rows of plain forwards) of each feed
Plan = Callable[[int], Feeds]  # the feeds of a text, by its seed, 0 or 1


def refusal_of(model: PreTrainedModel, purpose: str, remedy: str) -> Refusal:
    """From a reason to the error, which also says what the model cannot do ("be decoded"), and the remedy."""
    return lambda reason: ValueError(f"{type(model).__name__} cannot {purpose}: {reason}; {remedy}")


def check_feeds(model: PreTrainedModel, way: str, plan: Plan, refusal: Refusal) -> None:
    """Raise ValueError unless the feeds of a plan give what plain forwards give; a model passes each `way` once."""
    passed = _PASSED.setdefault(model, {})
    seeds = (0,) if model.dtype == torch.float64 else (0, 1)
    if way not in passed:
        if (error := _error(plan, way, refusal, _limits(model, _FEW_ROWS), seeds=seeds)) is not None:
            raise refusal(f"{way} change its outputs by {error:.2g} of their spread")
        passed[way] = False


def check_cache(cached: Cached) -> None:
    """Raise ValueError unless forwards through the cache give what a forward without one does; or set
    `one_token_at_a_time` if a prompt followed by single tokens gives what transformers' own cache gives.
    """
    passed = _PASSED.setdefault(cached.model, {})
    if "cache" not in passed:
        remedy = "choose a model whose whole state is in a cache that transformers can add tokens to"
        refusal = refusal_of(cached.model, "be decoded by a CachedModel", remedy)
        if cached.model.config.is_encoder_decoder:
            raise refusal("it is an encoder-decoder")
        _check_key_selection(cached, refusal)
        passed["cache"] = _needs_single_tokens(cached, refusal)
        cached.reset()
    cached.one_token_at_a_time = passed["cache"]


def check_tree(cached: Cached) -> None:
    """Raise ValueError unless each node of a tree in the cache has the logits of its path alone."""
    refusal = refusal_of(cached.model, "hold a tree of drafts", "only full attention can: draft chains with this model")
    _check_full_attention(cached, "nodes of a tree", partial(_tree_feeds, cached), refusal)


def check_batch(cached: Cached, batch_class: BatchClass) -> None:
    """Raise ValueError unless the rows of a `BatchModel` have the logits that each has alone, in `cached`."""
    remedy = "only full attention rolls back sequence by sequence: decode one prompt at a time"
    refusal = refusal_of(cached.model, "be decoded in batches", remedy)
    _check_full_attention(cached, "rows of different lengths", partial(_batch_feeds, cached, batch_class), refusal)


def _check_full_attention(cached: Cached, way: str, plan: Plan, refusal: Refusal) -> None:
    """`check_feeds` a model whose cache has layers of full attention alone; others are refused."""
    kinds = {type(layer) for layer in DynamicCache(config=cached.model.config).layers}
    if others := sorted(kind.__name__ for kind in kinds - {DynamicLayer}):
        raise refusal(f"its cache has {', '.join(others)}")
    check_feeds(cached.model, way, plan, refusal)
    cached.reset()


def _needs_single_tokens(cached: Cached, refusal: Refusal) -> bool:
    """True if tokens must be fed one at a time; raises ValueError if the logits are wrong even then."""
    limits = _limits(cached.model, _STATES if _has_states(cached) else _CHAINS)
    has_second_text = cached.model.dtype == torch.float32 or limits == _CHAINS
    chain = partial(_chain_feeds, cached)
    way = "this cache"
    error = _error(chain, way, refusal, limits, seeds=(0, 1) if has_second_text else (0,))
    if not any(map(is_written, cached.cache.layers)):
        raise refusal("its forward ignores the cache")
    if error is None:
        return False
    cached.one_token_at_a_time = True

    def generated(seed: int) -> Feeds:
        tokens = _text(cached, _STEPWISE_LENGTH, seed)
        yield _generated(cached, tokens), _logits(cached, tokens)

    for plan, its_limits in ((chain, limits), (generated, _STATES)):
        if _error(plan, way, refusal, its_limits) is not None:
            raise refusal(f"its logits through a cache differ from those without one by {error:.2g} of their spread")
    return True


def _check_key_selection(cached: Cached, refusal: Refusal) -> None:
    """Raise ValueError for attention to a few selected keys that tie: which it sees differs between forwards."""
    config = cached.model.config.get_text_config()
    max_length = cached.max_length
    num_kept = getattr(config, "keep_window_size", None)
    num_indexed = getattr(config, "index_topk", None)
    # Doge scores keys by their values, which hold no position
    if num_kept is not None and num_kept < max_length:
        raise refusal(f"it keeps {num_kept} keys of texts up to {max_length:.0f} tokens, and keys of equal tokens tie")
    num_heads = getattr(config, "index_n_heads", _MIN_INDEXER_HEADS)
    # DeepSeek's indexer, which has a ReLU
    if num_indexed is not None and num_indexed < max_length and num_heads < _MIN_INDEXER_HEADS:
        kept = f"keeps {num_indexed} keys of texts up to {max_length:.0f} tokens"
        raise refusal(f"its indexer of {num_heads} heads {kept}, and scores of 0 tie")


def _chain_feeds(cached: Cached, seed: int) -> Feeds:
    """The rows of each feed that follow right tokens only, without those of the prompt; and those of a forward
    without a cache, or if tokens are fed one at a time those that `generate` sees.
    """
    is_single = cached.one_token_at_a_time
    tokens = _text(cached, _STEPWISE_LENGTH if is_single else _CHAIN_LENGTH, seed)
    expected = _generated(cached, tokens) if is_single else _logits(cached, tokens)
    num_ids = cached.model.config.get_text_config().vocab_size
    cached.reset()
    feeds = chain_plan(len(tokens), has_states=_has_states(cached))
    for (start, end), (num_kept, _) in pairwise([*feeds, (len(tokens), len(tokens))]):
        cached.roll_back(start)
        num_right = min(num_kept, end)  # the tokens after these are wrong, and rolled back by the next feed
        wrong = [(token + 1) % num_ids for token in tokens[num_right:end]]
        num_rows = 1 if start == 0 else end - start
        logits = cached.feed([*tokens[:num_right], *wrong][len(cached) :], num_rows)
        first = end - num_rows
        if start > 0 and num_right > first:
            yield logits[: num_right - first], expected[first:num_right]


def chain_plan(length: int, *, has_states: bool) -> list[tuple[int, int]]:
    """The feeds of a text of this length: `_CHAIN` in proportion, and then the rest of the text."""
    scaled = [(start * length // _CHAIN_LENGTH, end * length // _CHAIN_LENGTH) for start, end in _CHAIN]
    plan = [(start, end) for start, end in scaled if start < end] or [(0, 1)]
    stride = 1 if has_states else length
    return plan + [(start, min(start + stride, length)) for start in range(plan[-1][1], length, stride)]


def _tree_feeds(cached: Cached, seed: int) -> Feeds:
    """(logits of a path in a tree, its logits alone), for every path, and for one after it was kept."""
    text = ids_of_plan(cached.model, _TREE_TEXT, seed)
    tree = Tree(ids_of_plan(cached.model, _TREE.tokens, seed), _TREE.parents)
    path = tree.path(len(tree) - 1)
    cached.reset()
    in_tree = cached.feed_tree(text, tree)[1:]
    cached.keep(path[:1])
    after_keeping = cached.feed(tree.tokens_of(path[1:]))
    for nodes, logits in [*zip(map(tree.path, range(len(tree))), in_tree.split(1), strict=True), (path, after_keeping)]:
        cached.reset()
        yield logits, cached.feed([*text, *tree.tokens_of(nodes)])


def _batch_feeds(cached: Cached, batch_class: BatchClass, seed: int) -> Feeds:
    """(logits of a row of a batch, those of its text alone), for every row of every feed."""
    batch = batch_class(cached, 2)
    for plan in _BATCH:
        texts = [ids_of_plan(cached.model, tokens, seed) for _, tokens in plan]
        for row, (num_kept, _) in zip(batch.rows, plan, strict=True):
            row.roll_back(num_kept)
        new_tokens = [text[len(row) :] for row, text in zip(batch.rows, texts, strict=True)]
        for text, logits in zip(texts, batch.feed(batch.rows, new_tokens, [1, 1]).split(1), strict=True):
            cached.reset()
            yield logits, cached.feed(text)


def _text(cached: Cached, length: int, seed: int) -> list[int]:
    """At most `length` tokens of few ids; forwards with and without a cache differ across a RoPE switch."""
    room = int(min(length, cached.limit_of(0)))
    generator = torch.Generator().manual_seed(seed)
    return ids_of_plan(cached.model, torch.randint(1, 10, (room,), generator=generator).tolist(), seed)


def ids_of_plan(model: PreTrainedModel, tokens: Iterable[int], seed: int) -> list[int]:
    """Ids for the numbers of a plan: the lowest, or for a second text those of words; high ones may be images."""
    num_ids = model.config.get_text_config().vocab_size
    return [(_FIRST_WORD * min(seed, 1) + token) % num_ids for token in tokens]


def _generated(cached: Cached, tokens: Sequence[int]) -> Rows:
    """The logits that `generate` sees: of a prompt, and then of one token at a time."""
    cache = DynamicCache(config=cached.model.config)
    num_prompt = chain_plan(len(tokens), has_states=True)[0][1]
    feeds = pairwise((0, *range(num_prompt, len(tokens) + 1)))
    return torch.cat([_logits(cached, tokens[start:end], start, cache) for start, end in feeds])


def _logits(cached: Cached, tokens: Sequence[int], start: int = 0, cache: DynamicCache | None = None) -> Rows:
    """Logits of the model's own forward of tokens from position `start` on; None: without a cache."""
    ids = torch.tensor([tokens], device=cached.device)
    positions = torch.arange(start, start + len(tokens), device=cached.device)[None]
    settings = cached.accepted(position_ids=positions, past_key_values=cache, cache_params=cache)
    return cached.model(input_ids=ids, use_cache=cache is not None, **settings).logits[0, :, : cached.vocab_size]


def row_errors(rows: Rows, expected: Rows) -> Float[Tensor, " row"]:
    """The error of each row; 0 if the expected row is not finite: such rows are refused when they are decoded."""
    expected = expected.to(rows.device)
    spread = expected.float().std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    errors = (rows - expected).abs().amax(-1).float() / spread
    return torch.where(expected.isfinite().all(-1), errors.nan_to_num(float("inf")), 0.0)


def _error(plan: Plan, way: str, refusal: Refusal, limits: Limits, *, seeds: Sequence[int] = (0,)) -> float | None:
    """The error of the worst row, or if only medians are limited of the worst median, of the best text; None if a
    text is within the limits. A forward that fails refuses its model, unless it runs out of memory.
    """
    largest = []
    for seed in seeds:
        try:
            with torch.inference_mode():
                errors = [row_errors(rows, expected) for rows, expected in plan(seed)]
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise refusal(f"its forward fails with {way} ({type(error).__name__}: {error})") from error
        short = [error for error in errors if len(error) < _NUM_MEDIAN_ROWS]
        groups = [torch.cat(short)] if short else []
        groups += [error for error in errors if len(error) >= _NUM_MEDIAN_ROWS]
        row = max((float(group.max()) for group in groups), default=0.0)
        median = max((float(group.median()) for group in groups), default=0.0)
        if row <= limits[0] and median <= limits[1]:
            return None
        largest.append(median if limits[0] == math.inf else row)
    return min(largest)


def _limits(model: PreTrainedModel, in_half: Limits) -> Limits:
    if model.dtype not in (torch.float32, torch.float64):
        return in_half
    is_rounded = model.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return _TF32 if is_rounded and device_of(model).type == "cuda" else _EXACT


def _has_states(cached: Cached) -> bool:
    return any(hasattr(layer, "has_previous_state") for layer in cached.cache.layers)


def is_written(layer: object) -> bool:
    """True if a forward has left anything in this layer of a cache."""
    states = getattr(layer, "has_previous_state", {})
    # by its name: the transformers that vLLM runs with has no such class
    return any(states.values()) or (getattr(layer, "is_initialized", False) and type(layer).__name__ != "DummyLayer")
