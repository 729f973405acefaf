"""A head is used with the draft, the target and the sampling that it was trained for, or refused with both named (law
4.1).
"""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from heads import AcceptanceHead
from heads.model.fits import check_fits, description_of
from heads.model.provenance import Provenance

WARM = {"temperature": 1.0, "top_k": None, "top_p": None}
MODEL = {"path": "models/draft", "name": "draft", "weights": "a" * 64, "commit": None, "revision": None}
MODEL |= {"hidden_size": 4}
ON_HUB = {"path": "org/m", "name": "org/m", "revision": "main"}


def head(**provenance) -> AcceptanceHead:
    return AcceptanceHead(4, 0, provenance=Provenance(**provenance))


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize(
    ("trained", "current", "message"),
    [
        (other, MODEL, f"trained with {other['path']}, but the ROLE is models/draft; .*allow_foreign")
        for other in (
            {"path": "models/other", "name": "draft", "weights": "b" * 64},
            {"path": "org/draft", "name": "org/draft", "commit": "b" * 40, "weights": "b" * 64},
            {"path": "org/other", "name": "org/other", "commit": "b" * 40},
            {"path": "models/wide", "name": "draft", "hidden_size": 8},
        )
    ]
    + [
        (
            MODEL | {"weights": "b" * 64},
            MODEL | {"role": "pair.draft"},
            r"models/draft \(weights b+\), but pair.draft is models/draft \(weights a+\)",
        ),
        (ON_HUB, ON_HUB | {"revision": "v2"}, r"revision main.*revision v2"),
    ],
)
def test_a_head_of_another_model_is_refused_with_both_named(role, trained, current, message):
    with pytest.raises(ValueError, match=message.replace("ROLE", role)):
        check_fits(head(**{role: trained}), "h", **{role: current})


def test_a_head_of_another_sampling_is_refused_with_both_named():
    with pytest.raises(ValueError, match=r"'temperature': 1\.0.*'temperature': 0\.5"):
        check_fits(head(sampling=WARM), "h", sampling=WARM | {"temperature": 0.5})


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"path": "elsewhere/copy", "name": "copy", "weights": "a" * 64},
        {"path": "org/draft", "name": "org/draft", "commit": "b" * 40},
        {"path": "checkpoints/draft", "name": "checkpoints/draft", "revision": None},
        MODEL | {"dtype": "bfloat16"},
    ],
)
def test_a_head_of_the_same_or_of_unknown_models_passes(same):
    check_fits(head(draft=same, target=same), "h", draft=MODEL, target=MODEL, sampling=WARM)
    check_fits(head(draft=ON_HUB, sampling=WARM), "h", draft=ON_HUB, sampling=WARM)


def test_a_model_in_memory_is_known_by_the_directory_that_it_came_from(tmp_path):
    config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    made = LlamaForCausalLM(config)
    assert description_of(made) == {"hidden_size": 4}
    made.save_pretrained(tmp_path)
    loaded = description_of(LlamaForCausalLM.from_pretrained(tmp_path))
    trained = head(draft=loaded)
    check_fits(trained, "h", draft=loaded)
    made.lm_head.weight.data += 1
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="weights"):
        check_fits(trained, "h", draft=description_of(LlamaForCausalLM.from_pretrained(tmp_path)))
