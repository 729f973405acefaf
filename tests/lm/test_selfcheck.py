"""What the checks of a model against itself find: feeds that differ from single tokens, and branches from chains."""

from itertools import pairwise, product

import pytest
import torch

from data_gen.labels.branches import check_branches
from lm import CachedModel
from lm.cache import Snapshots, make_cache
from lm.selfcheck import _text, chain_plan
from tests.conformance.families import FAMILIES, VOCAB_SIZE, build
from tests.toys.small_pair import random_llama

BY_NAME = {family.name: family for family in FAMILIES}


def llama(**sizes):
    return random_llama(vocab_size=VOCAB_SIZE, **{"max_position_embeddings": 256} | sizes)


DTYPES = torch.float64, torch.float32, torch.bfloat16
STEPWISE = [("zamba2", torch.float64), ("zamba2", torch.float32), ("jamba", torch.bfloat16), ("mamba", torch.float32)]
AT_ONCE = product(["qwen3_next", "olmo_hybrid", "granitemoehybrid", "mixtral (experts)"], DTYPES)


@pytest.mark.parametrize(("name", "dtype"), [*STEPWISE, *AT_ONCE])
def test_a_model_is_fed_one_token_at_a_time_where_longer_feeds_are_not_its_steps_but_for_rounding(name, dtype):
    cached = CachedModel(build(BY_NAME[name]).to(dtype))
    assert cached.one_token_at_a_time == ((name, dtype) in STEPWISE)


@pytest.mark.parametrize(("rounding_of_words", "is_refused"), [(0.1, False), (0.3, True)])
def test_half_precision_that_is_noisy_on_reserved_tokens_is_tried_on_words(rounding_of_words, is_refused, monkeypatch):
    """bfloat16 on ids that no training has met left errors of 0.2 to 1.2 in a published model that decodes well."""

    def noise(_rows, expected):
        is_word = tried[-1] >= 300
        return torch.full((len(expected),), rounding_of_words if is_word else 0.6)

    def text(cached, length, seed):
        ids = _text(cached, length, seed)
        tried.append(min(ids))
        return ids

    tried = []
    monkeypatch.setattr("lm.selfcheck.row_errors", noise)
    monkeypatch.setattr("lm.selfcheck._text", text)
    model = llama().to(torch.bfloat16)
    model.resize_token_embeddings(400)
    if is_refused:
        with pytest.raises(ValueError, match=r"differ from those without one by 0\.3 of their spread"):
            CachedModel(model)
    else:
        assert not CachedModel(model).one_token_at_a_time


@pytest.mark.parametrize(("first", "share"), [(0, 1e-3), (70, 1.0)])
def test_feeds_of_several_tokens_that_part_by_little_or_late_are_found(first, share):
    """A model whose logits move where it is fed 2 to 29 tokens after a cache, from position `first` on."""
    model = llama()
    forward = type(model.lm_head).forward.__get__(model.lm_head)

    def parting(hidden):
        logits = forward(hidden)
        is_draft = 1 < hidden.shape[1] < 30 and model.num_before >= first
        return logits + share * is_draft * logits.std() * torch.arange(VOCAB_SIZE) / VOCAB_SIZE

    def counting(_module, _inputs, keywords):
        model.num_before = keywords["position_ids"].min() if keywords.get("position_ids") is not None else 0

    model.num_before = 0
    model.lm_head.forward = parting
    model.model.register_forward_pre_hook(counting, with_kwargs=True)
    assert CachedModel(model).one_token_at_a_time


@pytest.mark.parametrize("length", [1, 2, 8, 20, 64, 150])
@pytest.mark.parametrize("has_states", [False, True])
def test_a_probe_feeds_the_whole_text_however_short_the_context(length, has_states):
    feeds = chain_plan(length, has_states=has_states)
    assert feeds[0][0] == 0
    assert feeds[-1][1] == length
    assert all(start < end for start, end in feeds)
    assert all(start <= end for (_, end), (start, _) in pairwise(feeds))
    assert CachedModel(llama(max_position_embeddings=length)).max_length == length


def test_going_back_further_than_the_copies_is_going_back_to_the_prompt():
    cache = make_cache(build(BY_NAME["mamba"]), 4)
    snapshots = Snapshots(cache)
    for length in (0, 5, *range(6, 106)):
        snapshots.take(length)
    assert snapshots.restore(40) == 5
    assert snapshots.restore(3) == 0


BRANCHING = ["llama (tied)", "gpt2 (learned positions)", "gpt_neox (partial rotary)", "mixtral (experts)"]
WINDOWED = ["mistral", "gemma3_text", "cohere2", "llama4_text"]


@pytest.mark.parametrize("name", [*BRANCHING, "mamba", "lfm2", *WINDOWED])
def test_branches_are_what_they_are_alone_and_a_window_shorter_than_a_response_is_refused(name):
    model = build(BY_NAME[name])
    check_branches(model, 8 if name in WINDOWED else 100, num_prompt=4)
    if name in WINDOWED:
        with pytest.raises(ValueError, match="sees 8 tokens"):
            check_branches(model, 9, num_prompt=4)


@pytest.mark.parametrize("name", ["bloom (ALiBi)", "mpt (ALiBi)"])
def test_a_family_whose_branches_would_be_wrong_is_refused_with_one_line(name):
    with pytest.raises(ValueError, match="cannot be recorded in a trace") as refusal:
        check_branches(build(BY_NAME[name]), 9, num_prompt=4)
    assert "\n" not in str(refusal.value)
