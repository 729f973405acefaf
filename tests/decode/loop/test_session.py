"""A generation refuses models that cannot serve it in one line, before the first token, whichever way in; and takes
those that can.
"""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from data_gen.labels.labeller import Labeller
from data_gen.responses.exchange import Exchange, Request
from data_gen.responses.in_process import TargetInProcess
from decode import (
    Cape,
    InterleavedDrafter,
    ModelDrafter,
    PearlDecoder,
    PreVerifiedDrafter,
    SpeculativeDecoder,
    TreeDrafter,
    speculative_generate,
)
from decode.policies import FixedLength, Policy
from evaluation.traces.coupling import Recorder
from evaluation.traces.recording import record_trace
from heads import AcceptanceHead
from lm import CachedModel, Sampling
from tests.toys import small_pair

PROMPT, NUM = [3, 1, 4, 1, 5], 12
WIDTH = 40


def llama(seed: int, width: int = WIDTH, dropout: float = 0.0) -> PreTrainedModel:
    config = small_pair.llama(vocab_size=width, num_hidden_layers=1, attention_dropout=dropout, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).double().eval()


def inside_transformers(target, draft, **how):
    settings = {"draft_model": draft, "do_sample": True, "max_new_tokens": NUM, **how}
    return target.generate(
        torch.tensor([PROMPT]), custom_generate=speculative_generate, return_dict_in_generate=True, **settings
    ).generation


def loop(drafter_of: Callable) -> Callable:
    """A generation of the loop whose drafter is made of a draft."""
    return lambda target, draft, **how: SpeculativeDecoder(target, drafter_of(draft, **how), **how).generate(
        PROMPT, NUM
    )


def model_drafter(draft, **how) -> ModelDrafter:
    return ModelDrafter(draft, FixedLength(3), **how)


WAYS_IN: dict[str, Callable] = {
    "chain": loop(model_drafter),
    "batch": lambda target, draft, **how: SpeculativeDecoder(target, model_drafter(draft, **how), **how).generate_batch(
        [PROMPT, [1]], NUM
    )[0],
    "tree": loop(lambda draft, **how: TreeDrafter(draft, FixedLength(3), Cape(), **how)),
    "pearl": lambda target, draft, **how: PearlDecoder(target, draft, gamma=2, **how).generate(PROMPT, NUM),
    "interleaved": loop(lambda draft, **how: InterleavedDrafter(draft, llama(7), **how)),
    "pre_verifying": loop(
        lambda draft, **how: PreVerifiedDrafter(model_drafter(llama(7), **how), draft, Policy(), **how)
    ),
    "pre_verified": loop(
        lambda draft, **how: PreVerifiedDrafter(model_drafter(draft, **how), llama(7), Policy(), **how)
    ),
    "inside_transformers": inside_transformers,
}


@pytest.fixture
def no_token(monkeypatch) -> None:
    """No forward beyond those that a model is tried with when it is made: those come before any generation is begun."""
    for kind in (SpeculativeDecoder, PearlDecoder):
        monkeypatch.setattr(kind, "_round", lambda *arguments: pytest.fail("a round was begun"))


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_draft_that_cannot_be_fed_what_the_target_may_emit_is_refused(way, no_token):
    with pytest.raises(ValueError, match="has embeddings for 36 ids, but the target may emit 40; use"):
        WAYS_IN[way](llama(0), llama(1, 36))


@pytest.mark.parametrize("way", sorted(set(WAYS_IN) - {"inside_transformers"}))
def test_a_draft_with_more_ids_than_what_verifies_it_is_refused(way, no_token):
    with pytest.raises(ValueError, match=r"logits for 44 ids, but its verifier for 40; pass vocab_size=40"):
        WAYS_IN[way](llama(0), llama(1, 44))


@pytest.mark.parametrize("width", [36, 44])
@pytest.mark.parametrize("way", WAYS_IN)
def test_models_of_several_widths_decode_the_ids_that_the_tokenizer_has(way, width):
    generation = WAYS_IN[way](llama(0), llama(1, width), vocab_size=36)
    assert len(generation.token_ids) == NUM
    assert max(generation.token_ids) < 36


def test_a_wider_draft_is_cut_to_the_target_inside_transformers():
    assert max(inside_transformers(llama(0), llama(1, 44)).token_ids) < WIDTH


def test_a_draft_whose_laws_alone_are_narrower_is_lossless():
    target, draft = llama(0), CachedModel(llama(1), vocab_size=20)
    expected = target.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NUM)[0, len(PROMPT) :].tolist()
    assert max(expected) >= 20
    for drafter in (ModelDrafter(draft, FixedLength(3)), InterleavedDrafter(CachedModel(llama(2)), draft)):
        decoder = SpeculativeDecoder(target, drafter, sampling=Sampling(temperature=0.0))
        assert list(decoder.generate(PROMPT, NUM).token_ids) == expected
        SpeculativeDecoder(target, drafter).generate(PROMPT, NUM)


def test_what_a_narrower_level_cannot_verify_is_refused(no_token):
    drafter = PreVerifiedDrafter(ModelDrafter(llama(2), FixedLength(2)), CachedModel(llama(1), vocab_size=20), Policy())
    with pytest.raises(ValueError, match="the draft has logits for 40 ids, but its verifier for 20"):
        SpeculativeDecoder(llama(0), drafter).generate(PROMPT, NUM)


@pytest.mark.parametrize("is_target", [False, True])
@pytest.mark.parametrize("way", WAYS_IN)
def test_a_model_in_train_mode_is_refused(way, is_target, no_token):
    target, draft = llama(0, dropout=0.5), llama(1, dropout=0.5)
    (target if is_target else draft).train()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is in train mode, .*; call \.eval\(\)"):
        WAYS_IN[way](target, draft)


@pytest.mark.parametrize("is_target", [False, True])
@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("part", ["whole", "one layer"])
def test_a_model_that_is_put_into_train_mode_between_two_generations_is_refused(part, is_batch, is_target):
    target, draft = llama(0, dropout=0.5), llama(1, dropout=0.5)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft, FixedLength(3)))
    decode = (lambda: decoder.generate_batch([PROMPT], NUM)) if is_batch else (lambda: decoder.generate(PROMPT, NUM))
    decode()
    model = target if is_target else draft
    (model if part == "whole" else model.model.layers[0]).train()
    with pytest.raises(ValueError, match="in train mode"):
        decode()
    model.eval()
    decode()


def recorded(target, draft):
    recorder = Recorder(draft, target, Sampling(), WIDTH, frozenset(), 3)
    return record_trace(recorder, [Exchange("a", "", PROMPT, [2, 3], "length")], max_new_tokens=2)


def labelled(target, draft):
    settings = {"vocab_size": WIDTH, "batch_size": 1, "chunk_mb": 1, "feature_dtype": torch.float32}
    labeller = Labeller(draft=draft, target=target, sampling=Sampling(), **settings)
    inputs = {"uniform": torch.full((2,), 0.5, dtype=torch.float64)}
    return labeller.label(
        [Exchange("a", "", PROMPT, [2, 3], "length")], inputs, with_hidden=False, progress=lambda _: None
    )


def responded(target, draft):
    settings = {"vocab_size": WIDTH, "eos_ids": frozenset(), "max_new_tokens": 2, "batch_size": 1}
    return TargetInProcess(target, Sampling(), **settings).respond([Request("a", "", PROMPT)], 0, lambda _: None)


@pytest.mark.parametrize(
    ("stage", "is_target"),
    [(recorded, True), (recorded, False), (labelled, True), (labelled, False), (responded, True)],
)
def test_a_stage_that_makes_data_or_traces_refuses_a_model_in_train_mode(stage, is_target):
    target, draft = llama(0), llama(1)
    assert stage(target, draft)
    (target if is_target else draft).train()
    with pytest.raises(ValueError, match="in train mode"):
        stage(target, draft)


def test_a_head_says_the_same_in_train_mode():
    head = AcceptanceHead(16, 2, "drawn", True)
    inputs = torch.randn(5, 16), torch.randn(5, 2)
    assert torch.equal(head.train()(*inputs), head.eval()(*inputs))


def streams(kind: str, shared: str) -> tuple[SpeculativeDecoder, SpeculativeDecoder]:
    """Two decoders with one model object between them."""
    models = {
        name: [CachedModel(llama(seed), holds_trees=kind == "tree") for seed in seeds]
        for name, seeds in (("target", (0, 0)), ("draft", (1, 1)))
    }
    models[shared][1] = models[shared][0]
    pairs = zip(models["target"], models["draft"], strict=True)
    if kind == "tree":
        one, other = (SpeculativeDecoder(target, TreeDrafter(draft, FixedLength(3), Cape())) for target, draft in pairs)
    elif kind == "pearl":
        one, other = (PearlDecoder(target, draft, gamma=2) for target, draft in pairs)
    else:
        one, other = (SpeculativeDecoder(target, ModelDrafter(draft, FixedLength(3))) for target, draft in pairs)
    return one, other


@pytest.mark.parametrize("shared", ["target", "draft"])
@pytest.mark.parametrize("kind", ["chain", "tree", "pearl"])
def test_decoders_that_share_a_model_take_turns_and_never_at_once(kind, shared):
    one, other = streams(kind, shared)
    alone = one.generate(PROMPT, NUM, generator=torch.Generator().manual_seed(0)).token_ids
    rounds = one.stream(PROMPT, NUM, generator=torch.Generator().manual_seed(0))
    begun = list(next(rounds).emitted)
    for decode in (lambda: other.generate(PROMPT, NUM), lambda: next(other.stream(PROMPT, NUM))):
        with pytest.raises(ValueError, match=f"the {shared} is already in use, .* another open stream"):
            decode()
    # the refused ones left it as it was
    assert (*begun, *(token for each in rounds for token in each.emitted)) == alone
    assert len(other.generate(PROMPT, NUM).token_ids) == NUM
    next(rounds := one.stream(PROMPT, NUM))
    rounds.close()
    assert len(other.generate(PROMPT, NUM).token_ids) == NUM


def test_a_batch_of_a_model_in_use_is_refused():
    one, other = streams("chain", "target")
    rounds = one.stream(PROMPT, NUM)
    next(rounds)
    with pytest.raises(ValueError, match="the target is already in use"):
        other.generate_batch([PROMPT], NUM)
    assert sum(len(each.emitted) for each in rounds) > 0
    assert len(other.generate_batch([PROMPT], NUM)[0].token_ids) == NUM


def test_a_model_object_cannot_be_target_and_draft_of_one_decoder(no_token):
    model = CachedModel(llama(0))
    with pytest.raises(ValueError, match="the draft is already in use, by another part of this generation"):
        SpeculativeDecoder(model, ModelDrafter(model, FixedLength(2))).generate(PROMPT, NUM)
