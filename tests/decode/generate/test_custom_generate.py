"""`generate(custom_generate=speculative_generate)` means what plain `generate` means, and leaves nothing behind."""

import gc
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GraniteConfig, PreTrainedModel

from decode import SpeculativeOutput, speculative_generate
from decode.policies import Entropy, FixedLength, HeadPolicy
from heads import AcceptanceHead, Provenance
from lm import CachedModel
from tests.toys.enumeration import assert_same_law, law_by, law_of
from tests.toys.random_pairs import IDS, SIZES, greedy_of, random_pair
from tests.toys.small_pair import llama

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize(
    "policy", [None, FixedLength(4), Entropy(0.6), HeadPolicy(AcceptanceHead(16, 1, "drawn", True))]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 8, "eos_token_id": [7, 9]},
        {"bad_words_ids": [[2], [4]], "repetition_penalty": 1.3, "eos_token_id": 11},
    ],
)
def test_greedy_output_under_processors_equals_plain_generate(policy, settings):
    target, draft = (model.to(torch.float64 if settings else torch.float32) for model in random_pair("llama"))
    settings |= {"do_sample": False, "max_new_tokens": 30}
    expected = target.generate(PROMPT, **settings)
    ours = target.generate(PROMPT, custom_generate=speculative_generate, draft_model=draft, policy=policy, **settings)
    assert ours.tolist() == expected.tolist()


def test_sampled_output_has_exactly_the_law_of_plain_generate():
    """Enumerated: temperature, top-k, repetition penalty and a minimum length, on random models over four tokens."""
    config = llama(**SMALL, vocab_size=4, bos_token_id=0, eos_token_id=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target, draft = (AutoModelForCausalLM.from_config(config).double().eval() for _ in range(2))
        for parameter in (*target.parameters(), *draft.parameters()):
            torch.nn.init.normal_(parameter)
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 2, "repetition_penalty": 1.4}
    settings |= {"min_new_tokens": 1, "max_new_tokens": 3}
    ours = {"custom_generate": speculative_generate, "draft_model": draft, "policy": FixedLength(2)}
    prompt = torch.tensor([[0, 1]])

    def play(draws):
        return tuple(target.generate(prompt, generator=draws, **ours, **settings)[0, 2:].tolist())

    processors = target.generate(
        prompt, custom_generate=lambda model, input_ids, logits_processor, **_: logits_processor, **settings
    )

    def probs(tokens):
        ids = torch.tensor([[0, 1, *tokens]])
        return processors(ids, target(ids).logits[:, -1].float()).softmax(-1)[0]

    assert_same_law(law_of(play), law_by(probs, 3, frozenset({3})), tolerance=1e-5)


TRAINED = {"sampling": {"temperature": 1.0, "top_k": None, "top_p": None}}
OTHER_SAMPLING = r"trained for sampling .*'temperature': 1.0.* allow_foreign_heads"


@pytest.mark.parametrize(
    ("provenance", "settings", "problem"),
    [
        (TRAINED, {"do_sample": False}, OTHER_SAMPLING),
        (TRAINED, {"do_sample": True}, "'top_k': 50"),
        ({"draft": {"name": "another", "hidden_size": 24}}, {"do_sample": False}, "the draft"),
        (TRAINED, {"do_sample": True, "top_k": 0}, None),
        ({}, {"do_sample": False}, None),
        (TRAINED, {"do_sample": False, "allow_foreign_heads": True}, None),
    ],
)
def test_a_head_that_was_trained_for_something_else_is_refused_unless_it_is_allowed(provenance, settings, problem):
    """Law 4.1."""
    target, draft = random_pair("llama")
    policy = HeadPolicy(AcceptanceHead(16, 1, "drawn", True, provenance=Provenance(**provenance)))
    given: dict[str, Any] = {"custom_generate": speculative_generate, "draft_model": draft, "policy": policy}
    given |= settings | {"max_new_tokens": 4}
    if problem is None:
        assert target.generate(PROMPT, **given).shape[1] > 5
    else:
        with pytest.raises(ValueError, match=problem):
            target.generate(PROMPT, **given)


@pytest.mark.parametrize("kept", [lambda draft: draft, CachedModel])
def test_nothing_of_a_generation_stays_behind_and_a_draft_is_free_although_the_traceback_of_an_error_lives(kept):
    """With a head, and a draft that is more than its halves (it scales its logits), so that states are caught."""
    target, _ = random_pair("llama")
    draft = AutoModelForCausalLM.from_config(GraniteConfig(**SIZES, **IDS, intermediate_size=32, logits_scaling=2.0))
    settings = {"custom_generate": speculative_generate, "do_sample": False, "max_new_tokens": 12}
    settings |= {"draft_model": kept(draft.double().eval()), "policy": HeadPolicy(AcceptanceHead(16, 1, "drawn", True))}

    def num_left() -> tuple[int, int]:
        gc.collect()
        modules = [*target.modules(), *draft.modules()]
        num_hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules)
        return sum(isinstance(each, CachedModel) for each in gc.get_objects()), num_hooks

    before = num_left()
    criteria = transformers.StoppingCriteriaList([transformers.MaxTimeCriteria("soon")])
    broken = partial(speculative_generate, streamer=transformers.TextStreamer(None, skip_prompt=True))
    errors = {"no attribute 'decode'": {"custom_generate": broken}, "'>' not": {"stopping_criteria": criteria}}
    for said, error in errors.items():
        with pytest.raises((TypeError, AttributeError), match=said) as traceback:
            target.generate(PROMPT, **settings | error)
        target.generate(PROMPT, **settings)
    del traceback
    assert num_left() == before


PAGE = Path(__file__).parents[3] / "docs/transformers.md"


def test_the_pages_first_lines_run_after_the_tutorial_with_the_fastest_head(tmp_path: Path, monkeypatch, capsys):
    """The tutorial's folders: the embedded models, and the heads that `tune` gave thresholds."""
    shutil.copytree(PAGE.parents[1] / "checkpoints/tiny", tmp_path / "checkpoints/tiny")
    exported = tmp_path / "checkpoints/runs/experiment/exported"
    width = AutoConfig.from_pretrained(tmp_path / "checkpoints/tiny/draft").hidden_size
    for name, speed in (("drawn-d0", 10.0), ("drawn-d1", 20.0)):
        tuned = {"max_rejection_prob": speed / 40, "is_calibrated": True, "tokens_per_s": speed, "t_target_s": 0.1}
        sampling = {"temperature": 1.0, "top_k": None, "top_p": None}
        provenance = Provenance(sampling=sampling, recommended=tuned)
        AcceptanceHead(width, int(name[-1]), "drawn", provenance=provenance).save_pretrained(exported / name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], str(PAGE), "exec"), names)
    assert (names["policy"].max_rejection_prob, names["policy"].head.depth) == (0.5, 1)
    assert names["tokenizer"].decode(names["output"][0]) in capsys.readouterr().out
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]


def test_a_repository_is_plain_generate_in_the_rounds_of_its_policy_and_refuses_what_ours_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The page's two files in a directory, as they would lie on the hub."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "repository/custom_generate"
    folder.mkdir(parents=True)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [code] = [code for code in blocks if "def generate(" in code]
    (folder / "generate.py").write_text(code)
    (folder / "requirements.txt").write_text("acceptance-heads\n")
    target, draft = random_pair("llama")
    ours = {"custom_generate": str(folder.parent), "trust_remote_code": True, "draft_model": draft}
    settings = {"do_sample": False, "max_new_tokens": 30, "repetition_penalty": 1.3, "return_dict_in_generate": True}
    output = target.generate(PROMPT, policy=FixedLength(4), **ours, **settings)
    assert isinstance(output, SpeculativeOutput)
    assert output.sequences.tolist() == target.generate(PROMPT, **settings).sequences.tolist()
    assert {len(one.drafted) for one in output.generation.rounds[:-1]} == {4}
    with pytest.raises(ValueError, match="does not support a batch of 2"):
        target.generate(PROMPT.repeat(2, 1), **ours, max_new_tokens=4)
    with pytest.raises(ValueError, match="trust_remote_code"):  # one that nobody trusts is not run
        target.generate(PROMPT, **ours | {"trust_remote_code": False})


TEXT = {"vocab_size": 120, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256}
TEXT |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
TOWER = {"hidden_size": 32, "intermediate_size": 32}
VISION = TOWER | {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14, "image_size": 28}
QWEN_VISION = TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 48}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}
QWEN_IDS = {"image_token_id": 119, "video_token_id": 118, "vision_start_token_id": 117, "vision_end_token_id": 116}
GEMMA_IDS = {"image_token_index": 119, "boi_token_index": 118, "eoi_token_index": 117, "mm_tokens_per_image": 4}
WRAPPERS = {
    # class: changes of the text model's config, config of the vision model, ids
    "Gemma3": ({"sliding_window": 8, "query_pre_attn_scalar": 12}, VISION, GEMMA_IDS),
    "Qwen2_5_VL": (ROPE, QWEN_VISION, QWEN_IDS),
    "Qwen3VL": (ROPE, QWEN_VISION | {"deepstack_visual_indexes": [0]}, QWEN_IDS),
    "Llava": ({"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}, {"image_token_index": 119}),
}


def random_wrapper(name: str) -> PreTrainedModel:
    text, vision, ids = WRAPPERS[name]
    config = getattr(transformers, f"{name}Config")(text_config={**TEXT, **text}, vision_config=vision, **ids)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_prompt_of_text_gives_the_tokens_of_plain_generate_and_images_are_refused_by_name(name):
    target = random_wrapper(name)
    prompt = torch.randint(3, 110, (1, 12))
    how = {"do_sample": False, "max_new_tokens": 20, "custom_generate": speculative_generate, "draft_model": target}
    ours = target.generate(input_ids=prompt, **how)
    assert ours[0, 12:].tolist() == greedy_of(target, prompt[0].tolist(), 20)
    if name == "Llava":
        given = {"input_ids": torch.tensor([[5, 6, *[119] * 4, 7]]), "pixel_values": torch.zeros(1, 3, 28, 28).double()}
        with pytest.raises(ValueError, match="images, sounds or videos"):
            target.generate(**given, **how)
