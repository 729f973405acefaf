"""Multimodal wrappers decode prompts of text as plain `generate` does; images are refused."""

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from decode import speculative_generate
from tests.toys.random_pairs import greedy_of

TEXT = {"vocab_size": 120, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256}
TEXT |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SIZES = {"hidden_size": 32, "intermediate_size": 32}
VISION = SIZES | {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14, "image_size": 28}
QWEN_VISION = SIZES | {"depth": 1, "num_heads": 2, "out_hidden_size": 48}
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
def test_a_prompt_of_text_gives_the_tokens_of_plain_generate(name):
    target = random_wrapper(name)
    prompt = torch.randint(3, 110, (1, 12))
    how = {"do_sample": False, "max_new_tokens": 20, "custom_generate": speculative_generate, "draft_model": target}
    ours = target.generate(input_ids=prompt, **how)
    assert ours[0, 12:].tolist() == greedy_of(target, prompt[0].tolist(), 20)


def test_images_are_refused_by_name():
    target = random_wrapper("Llava")
    given = {"input_ids": torch.tensor([[5, 6, *[119] * 4, 7]]), "pixel_values": torch.zeros(1, 3, 28, 28).double()}
    with pytest.raises(ValueError, match="images, sounds or videos"):
        target.generate(**given, max_new_tokens=4, custom_generate=speculative_generate, draft_model=target)
