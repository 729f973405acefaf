"""A generation refuses models that cannot serve it in one line, before the first token, whichever way in."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

import decode
from data_gen.labels.labeller import Labeller
from data_gen.responses.exchange import Exchange, Request
from data_gen.responses.target import TargetInProcess
from decode import ModelDrafter, PearlDecoder, PreVerifiedDrafter, SpeculativeDecoder, TreeDrafter
from decode.drafters.trees import SHAPES
from decode.policies import FixedLength, Policy
from evaluation.traces.coupling import Recorder
from evaluation.traces.recording import record_trace
from lm import CachedModel, Sampling
from tests.toys.enumeration import seeded
from tests.toys.random_pairs import greedy_of
from tests.toys.small_pair import random_llama

PROMPT, NUM, WIDTH = [3, 1, 4, 1, 5], 12, 40


def llama(seed: int, width: int = WIDTH) -> PreTrainedModel:
    return random_llama(seed, vocab_size=width, num_hidden_layers=1, attention_dropout=0.5, eos_token_id=None)


def inside_transformers(target, draft, **how):
    settings = {"custom_generate": decode.speculative_generate, "draft_model": draft, "return_dict_in_generate": True}
    settings |= {"do_sample": True, "max_new_tokens": NUM, **how}
    return target.generate(torch.tensor([PROMPT]), **settings).generation


def drafting(drafter_of: Callable, target, draft, **how):
    """A generation of the loop whose drafter is made of a draft."""
    return SpeculativeDecoder(target, drafter_of(draft, **how), **how).generate(PROMPT, NUM)


def in_batch(target, draft, **how):
    return SpeculativeDecoder(target, chain(draft, **how), **how).generate_batch([PROMPT, [1]], NUM)[0]


def chain(draft, **how) -> ModelDrafter:
    return ModelDrafter(draft, FixedLength(3), **how)


DRAFTERS: dict[str, Callable] = {
    "chain": chain,
    "tree": lambda draft, **how: TreeDrafter(draft, FixedLength(3), SHAPES["cape"], **how),
    "interleaved": lambda draft, **how: decode.InterleavedDrafter(draft, llama(7), **how),
    "pre_verifying": lambda draft, **how: PreVerifiedDrafter(chain(llama(7), **how), draft, Policy(), **how),
    "pre_verified": lambda draft, **how: PreVerifiedDrafter(chain(draft, **how), llama(7), Policy(), **how),
}
WAYS_IN: dict[str, Callable] = {name: partial(drafting, drafter) for name, drafter in DRAFTERS.items()} | {
    "batch": in_batch,
    "pearl": lambda target, draft, **how: PearlDecoder(target, draft, gamma=2, **how).generate(PROMPT, NUM),
    "inside_transformers": inside_transformers,
}


@pytest.fixture
def no_token(monkeypatch) -> None:
    """No forward beyond those that a model is tried with when it is made: those come before any generation is begun."""
    for kind in (SpeculativeDecoder, PearlDecoder):
        monkeypatch.setattr(kind, "_round", lambda *arguments: pytest.fail("a round was begun"))


IN_TRAIN_MODE = r"LlamaForCausalLM is in train mode, .*; call \.eval\(\)"
REFUSED = {
    "fewer embeddings": (llama, partial(llama, width=36), "has embeddings for 36 ids, but the target may emit 40; use"),
    "more logits": (llama, partial(llama, width=44), "logits for 44 ids, but its verifier for 40; pass vocab_size=40"),
    "target in train mode": (lambda seed: llama(seed).train(), llama, IN_TRAIN_MODE),
    "draft in train mode": (llama, lambda seed: llama(seed).train(), IN_TRAIN_MODE),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("way", WAYS_IN)
def test_models_that_cannot_serve_are_refused_whichever_way_in(way, what, request):
    target, draft, message = REFUSED[what]
    if (way, what) == ("inside_transformers", "more logits"):  # where a wider draft is cut to the target
        assert max(inside_transformers(target(0), draft(1)).token_ids) < WIDTH
        return
    request.getfixturevalue("no_token")
    with pytest.raises(ValueError, match=message):
        WAYS_IN[way](target(0), draft(1))


@pytest.mark.parametrize("width", [36, 44])
@pytest.mark.parametrize("way", WAYS_IN)
def test_models_of_several_widths_decode_the_ids_that_the_tokenizer_has(way, width):
    generation = WAYS_IN[way](llama(0), llama(1, width), vocab_size=36)
    assert len(generation.token_ids) == NUM
    assert max(generation.token_ids) < 36


def test_a_draft_whose_laws_alone_are_narrower_is_lossless():
    target, draft = llama(0), CachedModel(llama(1), vocab_size=20)
    expected = greedy_of(target, PROMPT, NUM)
    assert max(expected) >= 20
    for drafter in (ModelDrafter(draft, FixedLength(3)), decode.InterleavedDrafter(CachedModel(llama(2)), draft)):
        decoder = SpeculativeDecoder(target, drafter, sampling=Sampling(temperature=0.0))
        assert list(decoder.generate(PROMPT, NUM).token_ids) == expected
        SpeculativeDecoder(target, drafter).generate(PROMPT, NUM)


def test_what_a_narrower_level_cannot_verify_and_a_model_in_two_roles_are_refused(no_token):
    drafter = PreVerifiedDrafter(ModelDrafter(llama(2), FixedLength(2)), CachedModel(llama(1), vocab_size=20), Policy())
    with pytest.raises(ValueError, match="the draft has logits for 40 ids, but its verifier for 20"):
        SpeculativeDecoder(llama(0), drafter).generate(PROMPT, NUM)
    model = CachedModel(llama(0))
    with pytest.raises(ValueError, match="the draft is already in use, by another part of this generation"):
        SpeculativeDecoder(model, ModelDrafter(model, FixedLength(2))).generate(PROMPT, NUM)


EXCHANGE = Exchange("a", "", PROMPT, [2, 3], "length")


def recorded(target, draft):
    recorder = Recorder(draft, target, Sampling(), WIDTH, frozenset(), 3)
    return lambda: record_trace(recorder, [EXCHANGE], max_new_tokens=2)


def labelled(target, draft):
    settings = {"vocab_size": WIDTH, "batch_size": 1, "chunk_mb": 1}
    labeller = Labeller(draft=draft, target=target, sampling=Sampling(), **settings)
    inputs = {"uniform": torch.full((2,), 0.5, dtype=torch.float64)}
    return lambda: labeller.label([EXCHANGE], inputs, progress=lambda _: None)


def responded(target, _):
    settings = {"vocab_size": WIDTH, "eos_ids": frozenset(), "max_new_tokens": 2, "batch_size": 1}
    source = TargetInProcess(target, Sampling(), **settings)
    return lambda: source.respond([Request("a", "", PROMPT)], 0, lambda _: None)


def decoded(target, draft, way="generate", prompt=PROMPT):
    return partial(getattr(SpeculativeDecoder(target, chain(draft)), way), prompt, NUM)


BATCHED = partial(decoded, way="generate_batch", prompt=[PROMPT])


@pytest.mark.parametrize("stage", [decoded, BATCHED, recorded, labelled, responded])
def test_a_model_that_is_put_into_train_mode_between_two_runs_is_refused_by_every_stage(stage):
    target, draft = llama(0), llama(1)
    run = stage(target, draft)
    for part in (target, draft.model.layers[0])[: 1 + (stage is not responded)]:
        run()
        part.train()
        with pytest.raises(ValueError, match="in train mode"):
            run()
        part.eval()


def streams(kind: str, shared: str) -> list[SpeculativeDecoder | PearlDecoder]:
    """Two decoders with one model object between them."""
    models = {name: [CachedModel(llama(seed), holds_trees=kind == "tree") for _ in range(2)] for seed, name in ROLES}
    models[shared][1] = models[shared][0]
    pairs = zip(models["target"], models["draft"], strict=True)
    if kind == "pearl":
        return [PearlDecoder(target, draft, gamma=2) for target, draft in pairs]
    return [SpeculativeDecoder(target, DRAFTERS[kind](draft)) for target, draft in pairs]


ROLES = list(enumerate(("target", "draft")))


@pytest.mark.parametrize("shared", ["target", "draft"])
@pytest.mark.parametrize("kind", ["chain", "tree", "pearl"])
def test_decoders_that_share_a_model_take_turns_and_never_at_once(kind, shared):
    one, other = streams(kind, shared)
    alone = one.generate(PROMPT, NUM, generator=seeded()).token_ids
    rounds = one.stream(PROMPT, NUM, generator=seeded())
    begun = list(next(rounds).emitted)
    generate = other.generate_batch if kind == "chain" else other.generate
    for refused in (generate, lambda prompt, num: next(other.stream(prompt, num))):
        with pytest.raises(ValueError, match=f"the {shared} is already in use, .* another open stream"):
            refused([PROMPT] if refused == other.generate_batch else PROMPT, NUM)
    # the refused ones left it as it was
    assert (*begun, *(token for each in rounds for token in each.emitted)) == alone
    next(rounds := one.stream(PROMPT, NUM))
    rounds.close()
    assert len(other.generate(PROMPT, NUM).token_ids) == NUM
    assert kind != "chain" or len(other.generate_batch([PROMPT], NUM)[0].token_ids) == NUM
