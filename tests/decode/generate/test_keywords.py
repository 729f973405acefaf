"""Every keyword of `generate` means what it means without speculation, changes nothing, or is refused by name."""

from functools import partial
from itertools import chain

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer, EosTokenCriteria

from decode import speculative_generate
from decode.policies import Assisted, FixedLength, Heuristic
from tests.toys.random_pairs import CONFIGS, random_pair

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
GREEDY = {"do_sample": False, "max_new_tokens": 12}


def generate(target: PreTrainedModel, draft: PreTrainedModel | None, prompt: torch.Tensor | None = PROMPT, **settings):
    """speculative_generate, greedy unless `settings` say otherwise."""
    return target.generate(prompt, custom_generate=speculative_generate, draft_model=draft, **GREEDY | settings)


def assert_as_plain(target: PreTrainedModel, draft: PreTrainedModel, settings: dict) -> None:
    assert generate(target, draft, **settings).tolist() == target.generate(PROMPT, **GREEDY | settings).tolist()


class Spelling:
    """A tokenizer of 40 letters, as far as stop strings ask."""

    def __len__(self) -> int:
        return 40

    def get_vocab(self):
        return {chr(48 + token): token for token in range(40)}

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) - 48 for letter in text]}

    def _convert_id_to_token(self, token):
        return chr(48 + token)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


SPELLING = Spelling()


def filled(target: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(PROMPT[:, :3], past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"dola_layers": "low"}, "dola_layers=low"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "padded"),
        ({"position_ids": torch.tensor([[0, 0, 1, 2, 3]])}, "position_ids"),
        ({"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[2, 2]])}, "guidance"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"token_type_ids": torch.zeros_like(PROMPT)}, "token_type_ids .*shape"),
        ({"inputs": PROMPT.repeat(2, 1)}, "batch of 2"),
        ({"stop_strings": ["AB"], "tokenizer": SPELLING}, "stop strings"),
        ({"past_key_values": lambda target: DynamicCache(config=target.config)}, "cache handed in"),
        ({"past_key_values": lambda target: filled(target)}, "cache handed in"),
        ({"past_key_values": lambda target: transformers.StaticCache(target.config, 32)}, "cache handed in"),
        ({"inputs": None, "inputs_embeds": lambda target: target.get_input_embeddings()(PROMPT)}, "inputs_embeds"),
        ({"draft_model": None}, "needs a draft"),
        ({"max_new_tokens": 61}, "context of 64"),
        ({"policy": FixedLength(2), "num_assistant_tokens": 2}, "num_assistant_tokens and a policy are both set"),
        ({"policy": "fixed_length:k=-4"}, "k is -4"),
        ({"num_assistant_tokens_schedule": "linear"}, "schedule is 'linear'.*heuristic_transient"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens is 0"),
        ({"inputs": torch.tensor([[3, 40]])}, "token id 40.*ids 0 to 39"),
        ({"forced_eos_token_id": 39, "vocab_size": 30, "max_new_tokens": 2}, "leave no token among the 30 ids"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, said):
    target, draft = random_pair("llama")
    if "token_type_ids" in changes:  # which `generate` lets pass only if forward knows it
        target.__class__ = type(type(target).__name__, (type(target),), {"forward": knowing_token_types})
    settings = {"inputs": PROMPT, "custom_generate": speculative_generate, "draft_model": draft, **GREEDY} | changes
    for name in ("past_key_values", "inputs_embeds"):
        if name in changes:
            settings[name] = torch.no_grad()(changes[name])(target)
    with pytest.raises(ValueError, match=said):
        target.generate(**settings)


def knowing_token_types(self, input_ids=None, token_type_ids=None, **kwargs):
    return super(type(self), self).forward(input_ids=input_ids, **kwargs)


def test_encoder_decoders_are_refused(monkeypatch):
    target, draft = random_pair("llama")
    monkeypatch.setattr(target.config, "is_encoder_decoder", True)
    with pytest.raises(ValueError, match="encoder-decoder"):
        speculative_generate(target, PROMPT, generation_config=target.generation_config, draft_model=draft)


class Written(BaseStreamer):
    """Everything that a streamer is given."""

    def __init__(self):
        self.pieces, self.has_ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.has_ended = True


class StopsAfter(StoppingCriteria):
    """Ends a text after so many new tokens; remembers which scores it was given."""

    def __init__(self, num_tokens):
        self.num_tokens, self.scores = num_tokens, []

    def __call__(self, input_ids, scores, **_):
        self.scores.append(scores)
        return torch.tensor([input_ids.shape[1] - PROMPT.shape[1] == self.num_tokens])


def test_a_streamer_is_given_each_round_up_to_where_a_criterion_stops_which_is_called_as_by_plain_generate():
    target, draft = random_pair("llama")
    streamer, scores, texts = Written(), [], []
    ours = partial(speculative_generate, draft_model=draft, policy=FixedLength(4), streamer=streamer)
    for how in ({}, {"custom_generate": ours}):
        criterion = StopsAfter(7)
        text = target.generate(PROMPT, stopping_criteria=StoppingCriteriaList([criterion]), **GREEDY | how)
        scores.append(criterion.scores)
        texts.append(text[0].tolist())
    assert scores[0] == scores[1] == [None] * 7
    assert texts[0] == texts[1] == list(chain.from_iterable(streamer.pieces))
    assert streamer.has_ended
    assert streamer.pieces[0] == PROMPT[0].tolist()
    assert max(map(len, streamer.pieces[1:])) > 1


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_mask": torch.ones_like(PROMPT)},
        {"position_ids": torch.arange(5)[None]},
        {"use_cache": False},
        {"logits_to_keep": 2},
        {"negative_prompt_ids": torch.tensor([[2, 2]])},
        {"tokenizer": SPELLING},
        {"token_type_ids": None},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [2, 7, 11, int(ids[-1])]},
        {"min_new_tokens": 6, "eos_token_id": list(range(0, 40, 3))},
        {"max_time": 60.0},
    ],
)
def test_what_is_supported_or_harmless_gives_the_tokens_of_plain_generate(settings):
    assert_as_plain(*random_pair("llama"), settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
        {"forced_eos_token_id": 38},
        {"suppress_tokens": [37, 39]},
    ],
)
def test_processors_may_name_ids_that_a_narrower_draft_lacks(settings):
    target, _ = random_pair("llama")
    config = transformers.LlamaConfig(**CONFIGS["llama"].to_dict() | {"vocab_size": 36})
    draft = AutoModelForCausalLM.from_config(config).double()
    draft.resize_token_embeddings(36)
    draft.get_input_embeddings().weight.data = target.get_input_embeddings().weight.data.clone()  # fed every id
    assert_as_plain(target, draft.eval(), settings)


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({}, Heuristic()),
        ({"policy": "fixed_length:k=3"}, FixedLength(3)),
        ({"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.0}, Assisted(2, 0.0)),
        ({"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}, Assisted(2, 0.4, True)),
        ({"assistant_confidence_threshold": 0.7}, Assisted(20, 0.7)),
    ],
)
def test_the_settings_of_assisted_generation_and_policies_in_words_decide_the_draft_lengths(settings, policy):
    target, draft = random_pair("llama")
    ours, expected = (
        generate(target, draft, max_new_tokens=40, return_dict_in_generate=True, **how).generation.rounds
        for how in (settings, {"policy": policy})
    )
    assert [round_.drafted for round_ in ours] == [round_.drafted for round_ in expected]


def test_a_draft_given_by_its_path_drafts_as_the_loaded_one_and_ids_keep_their_dtype(tmp_path):
    target, draft = random_pair("llama")
    draft.save_pretrained(tmp_path)
    ours, expected = (
        generate(target, model, return_dict_in_generate=True).generation for model in (str(tmp_path), draft)
    )
    assert [r.drafted for r in ours.rounds] == [r.drafted for r in expected.rounds]
    for dtype in (torch.int32, torch.int64):
        plain, ours = target.generate(PROMPT.to(dtype), **GREEDY), generate(target, draft, PROMPT.to(dtype))
        assert (ours.dtype, ours.tolist()) == (plain.dtype, plain.tolist())


@pytest.mark.parametrize("place", [3, 7])
@pytest.mark.parametrize("kind", ["length", "eos", "shorter than the prompt", "strings"])
def test_a_criterion_of_ones_own_takes_the_place_of_the_configs(place, kind):
    target, draft = random_pair("llama")
    plain = target.generate(PROMPT, **GREEDY)[0].tolist()
    own = {
        "length": transformers.MaxLengthCriteria(5 + place),
        "eos": EosTokenCriteria(plain[5 + place]),
        "shorter than the prompt": transformers.MaxLengthCriteria(2),
        "strings": transformers.StopStringCriteria(SPELLING, [chr(48 + plain[4 + place]) + chr(48 + plain[5 + place])]),
    }[kind]
    assert_as_plain(target, draft, {"stopping_criteria": StoppingCriteriaList([own]), "eos_token_id": plain[5 + 9]})


def test_a_cache_without_attention_layers_is_told_from_one_handed_in():
    """Mamba's caches have no length to ask for: generate's own is empty, and a user's is refused."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    target, draft = (AutoModelForCausalLM.from_config(transformers.MambaConfig(**sizes)).eval() for _ in range(2))
    assert_as_plain(target, draft, {})
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(PROMPT[:, :3], cache_params=cache)
    with pytest.raises(ValueError, match="cache handed in"):
        generate(target, draft, cache_params=cache)
