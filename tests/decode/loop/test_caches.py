"""Caches of kept models: what a failed forward leaves, how much they hold, and what is copied as a text grows."""

import pytest
import torch

from decode import ModelDrafter, SpeculativeDecoder, TreeDrafter
from decode.drafters.trees import dynamic
from decode.policies import FixedLength, HeadPolicy
from heads import AcceptanceHead
from lm import CachedModel, Sampling
from lm.batch import batch_of
from lm.cache import BufferLayer
from tests.conformance.families import FAMILIES, build
from tests.toys.enumeration import seeded
from tests.toys.random_drafts import beside, draft, target_of
from tests.toys.random_pairs import greedy_of
from tests.toys.small_pair import random_llama

PROMPT = [1, 2, 3, 4, 5]
BY_NAME = {family.name: family for family in FAMILIES}
GREEDY = Sampling(temperature=0.0)


def loop(target, drafter, **settings) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, drafter, **{"sampling": GREEDY, "eos_ids": frozenset()} | settings)


def roomy(seed: int):
    return random_llama(seed, max_position_embeddings=2048)


def failing(error: BaseException):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing_role", ["target", "draft"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_decoder_whose_forward_has_failed_decodes_the_next_prompt(num_before, failing_role, error):
    """In the second layer, where the first one holds the prompt already; at the prompt, and after a few tokens."""
    models = {"target": random_llama(0), "draft": random_llama(1)}
    decoder = loop(models["target"], ModelDrafter(models["draft"], FixedLength(3)))
    expected = decoder.generate(PROMPT[:3], 6).token_ids
    rounds = decoder.stream(PROMPT, 9)
    for _ in range(num_before):
        next(rounds)
    hook = models[failing_role].model.layers[1].register_forward_pre_hook(failing(error))
    with pytest.raises(type(error)):
        next(rounds)
    hook.remove()
    assert decoder.generate(PROMPT[:3], 6).token_ids == expected


def test_a_layer_that_finds_no_memory_for_a_longer_text_is_as_it_was(monkeypatch):
    cached = CachedModel(roomy(0))
    cached.feed(list(range(1, 16)) * 16)
    with monkeypatch.context() as patch:
        patch.setattr("lm.cache.functional.pad", failing(torch.OutOfMemoryError("no memory")))
        with pytest.raises(torch.OutOfMemoryError):
            cached.feed(PROMPT * 8)
    cached.reset()
    assert len(cached.feed([1, 2, 3] * 200, 600)) == 600


DRAFTERS = {
    "chain": lambda: (roomy(0), ModelDrafter(roomy(1), FixedLength(4))),
    "tree": lambda: (
        CachedModel(roomy(0), holds_trees=True),
        TreeDrafter(CachedModel(roomy(1), holds_trees=True), FixedLength(3), dynamic(3, 9)),
    ),
}


@pytest.mark.parametrize("kind", [*DRAFTERS, "batch", "eagle"])
def test_what_is_cached_is_not_copied_as_a_text_grows(kind, monkeypatch):
    monkeypatch.setattr(BufferLayer, "_make_room", failing(AssertionError("copied")))
    if kind == "eagle":
        verifier, model = beside(target_of("eagle"), draft("eagle"))
        verifier._max_length = float("inf")
        verifier.reset(600)
        model.reset(600)
        tokens = [1 + index % 6 for index in range(600)]
        verifier.feed(tokens)
        model.feed(tokens)
        return
    decoder = loop(*DRAFTERS["chain" if kind == "batch" else kind]())
    if kind == "batch":
        decoder.generate_batch([PROMPT, [4]], [400, 500], batch_size=2)
    else:
        decoder.generate(PROMPT, 400)


def capacities(*models) -> list[int]:
    caches = [model.cache if isinstance(model, CachedModel) else model._cache for model in models]
    return [layer.capacity for cache in caches for layer in cache.layers]


@pytest.mark.parametrize("has_batch", [False, True])
def test_a_limit_that_is_never_reached_takes_no_memory(has_batch):
    target, model = (CachedModel(random_llama(seed, max_position_embeddings=2**21)) for seed in (0, 1))
    decoder = loop(target, ModelDrafter(model, FixedLength(3)))
    if has_batch:
        batch = decoder.batch([PROMPT, [4]], 10**6, batch_size=2)
        next(iter(batch))
        held = capacities(batch._target, batch._draft)
    else:
        next(decoder.stream(PROMPT, 10**6))
        held = capacities(target, model)
    assert max(held) < 5000


def test_a_long_text_grows_in_steps_and_keeps_what_it_holds(monkeypatch):
    monkeypatch.setattr("lm.cache._MAX_STEP", 128)
    monkeypatch.setattr("decode.loop.session._MAX_NEW", 100)
    target, model = (
        CachedModel(random_llama(seed, max_position_embeddings=2048, eos_token_id=None)) for seed in (0, 1)
    )
    decoder = loop(target, ModelDrafter(model, FixedLength(4)))
    generated = list(decoder.generate(PROMPT, 400).token_ids)
    assert generated == greedy_of(target.model, PROMPT, 400)
    assert set(capacities(target, model)) == {256 + 2 * 128}


def test_a_batch_of_one_holds_one_row():
    batch = batch_of(CachedModel(random_llama(0)), 1, 20)
    batch.feed(batch.rows, [PROMPT], [1])
    assert {len(layer.keys if layer.feed is None else layer._keys) for layer in batch._cache.layers} == {1}


def test_a_recurrent_draft_keeps_no_more_copies_of_its_states_than_a_round_needs():
    model = build(BY_NAME["mamba2"])
    draft_model = CachedModel(model)
    decoder = loop(CachedModel(model), ModelDrafter(draft_model, FixedLength(3)))
    expected = loop(model, ModelDrafter(model, FixedLength(0))).generate(PROMPT, 40).token_ids
    nums = []
    tokens = []
    for played in decoder.stream(PROMPT, 40):
        tokens += played.emitted
        nums.append(max(len(each._snapshots._copies) for each in (draft_model, decoder.target)))
    assert max(nums) <= 5
    assert tuple(tokens) == expected


def test_a_batch_that_is_iterated_twice_decodes_once():
    decoder = loop(random_llama(0), ModelDrafter(random_llama(1), FixedLength(2)))
    batch = decoder.batch([PROMPT, [4]], 5, batch_size=2)
    assert list(batch)
    assert not list(batch)
    assert [len(each.token_ids) for each in batch.generations] == [5, 5]


def test_a_kept_model_keeps_the_states_that_a_head_reads():
    """Gemma 2 has a soft cap after its LM head, so a hook records them."""
    model = build(BY_NAME["gemma2 (soft-capped logits)"])
    width = model.config.get_text_config().hidden_size
    policy = HeadPolicy(AcceptanceHead(width, 0, "drawn").double(), 0.5)
    how = {"sampling": Sampling(), "max_draft_length": 3}
    fresh = loop(model, ModelDrafter(model, policy), **how).generate(PROMPT, 6, generator=seeded())
    kept = loop(model, ModelDrafter(CachedModel(model), policy), **how).generate(PROMPT, 6, generator=seeded())
    assert kept.token_ids == fresh.token_ids
