"""Multimodal wrappers decode prompts of text as plain `generate` does; images are refused."""

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from decode import speculative_generate

TEXT = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "max_position_embeddings": 256,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}
PIXTRAL = {**VISION, "model_type": "pixtral", "image_size": 28, "head_dim": 16}
CLIP = {**VISION, "model_type": "clip_vision_model", "image_size": 28}
QWEN_IDS = {"image_token_id": 119, "video_token_id": 118, "vision_start_token_id": 117, "vision_end_token_id": 116}
WRAPPERS = {
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 12},
            vision_config={**VISION, "image_size": 28},
            image_token_index=119,
            boi_token_index=118,
            eoi_token_index=117,
            mm_tokens_per_image=4,
        )
    ),
    "qwen2.5-vl": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config={**TEXT, **ROPE}, vision_config=QWEN_VISION, **QWEN_IDS)
    ),
    "qwen3-vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**TEXT, **ROPE}, vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]}, **QWEN_IDS
        )
    ),
    "mistral3": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(text_config={**TEXT, "model_type": "mistral"}, vision_config=PIXTRAL, image_token_index=119)
    ),
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(text_config={**TEXT, "model_type": "llama"}, vision_config=CLIP, image_token_index=119)
    ),
    "internvl": lambda: InternVLForConditionalGeneration(
        InternVLConfig(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config={**VISION, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
            image_token_id=119,
        )
    ),
}


def random_wrapper(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = WRAPPERS[name]().double().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_prompt_of_text_gives_the_tokens_of_plain_generate(name):
    target = random_wrapper(name)
    prompt = torch.randint(3, 110, (1, 12))
    plain = target.generate(input_ids=prompt, do_sample=False, max_new_tokens=20)
    ours = target.generate(
        input_ids=prompt, do_sample=False, max_new_tokens=20, custom_generate=speculative_generate, draft_model=target
    )
    assert ours.tolist() == plain.tolist()


def test_images_are_refused_by_name():
    target = random_wrapper("llava")
    prompt = torch.tensor([[5, 6, 119, 119, 119, 119, 7]])
    with pytest.raises(ValueError, match="images, sounds or videos"):
        target.generate(
            input_ids=prompt,
            pixel_values=torch.zeros(1, 3, 28, 28).double(),
            max_new_tokens=4,
            custom_generate=speculative_generate,
            draft_model=target,
        )
