"""A call of speculative_generate leaves the models as it came upon them: no hook on them, and no cache that lives as
long as they do.
"""

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from decode import speculative_generate
from decode.policies import HeadPolicy
from heads import AcceptanceHead
from lm import CachedModel
from tests.toys.random_pairs import IDS, SIZES, random_pair

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def num_hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_nothing_of_a_generation_stays_behind():
    """With a head, and a draft that is more than its halves (it scales its logits), so that hidden states have to be
    caught.
    """
    target, _ = random_pair("llama")
    config = GraniteConfig(**SIZES, **IDS, intermediate_size=32, logits_scaling=2.0)
    draft = AutoModelForCausalLM.from_config(config).double().eval()
    settings = {"custom_generate": speculative_generate, "draft_model": draft, "do_sample": False, "max_new_tokens": 12}
    settings["policy"] = HeadPolicy(AcceptanceHead(16, 1, "drawn", True))

    class Fails(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            raise RuntimeError("a criterion's own mistake")

    def play() -> None:
        target.generate(PROMPT, **settings)
        with pytest.raises(RuntimeError, match="own mistake"):
            target.generate(PROMPT, stopping_criteria=StoppingCriteriaList([Fails()]), **settings)

    def num_left() -> tuple[int, int]:
        gc.collect()
        return sum(isinstance(each, CachedModel) for each in gc.get_objects()), num_hooks(draft) + num_hooks(target)

    before = num_left()
    for _ in range(2):
        play()
    assert num_left() == before
