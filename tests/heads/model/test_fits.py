"""A head is used with the draft, the target and the sampling that it was trained for, or refused with both named (law
4.1).
"""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from heads import AcceptanceHead
from heads.model.fits import check_fits, description_of
from heads.model.provenance import Provenance

WARM = {"temperature": 1.0, "top_k": None, "top_p": None}
HERE = {
    "path": "models/draft",
    "name": "draft",
    "weights": "a" * 64,
    "commit": None,
    "revision": None,
    "hidden_size": 4,
}


def head(**provenance) -> AcceptanceHead:
    return AcceptanceHead(4, 0, provenance=Provenance(**provenance))


def test_a_head_of_another_sampling_is_refused_with_both_named():
    trained = head(sampling=WARM)
    check_fits(trained, "h", sampling=WARM)
    with pytest.raises(ValueError, match=r"'temperature': 1\.0.*'temperature': 0\.5"):
        check_fits(trained, "h", sampling=WARM | {"temperature": 0.5})


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize(
    "other",
    [
        {"path": "models/other", "name": "draft", "weights": "b" * 64},
        {"path": "org/draft", "name": "org/draft", "commit": "b" * 40, "weights": "b" * 64},
        {"path": "org/other", "name": "org/other", "commit": "b" * 40},
        {"path": "models/wide", "name": "draft", "hidden_size": 8},
    ],
)
def test_a_head_of_another_model_is_refused_with_both_named(role, other):
    with pytest.raises(
        ValueError,
        match=f"the head h was trained with {other['path']}, but the {role} is models/draft; .*allow_foreign",
    ):
        check_fits(head(**{role: other}), "h", **{role: HERE})


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"path": "elsewhere/copy", "name": "copy", "weights": "a" * 64},
        {"path": "org/draft", "name": "org/draft", "commit": "b" * 40},
        {"path": "checkpoints/draft", "name": "checkpoints/draft", "revision": None},
        HERE | {"dtype": "bfloat16"},
    ],
)
def test_a_head_that_says_nothing_else_passes(same):
    check_fits(head(draft=same, target=same), "h", draft=HERE, target=HERE, sampling=WARM)


def test_two_models_at_one_path_are_told_apart_by_their_weights():
    with pytest.raises(ValueError, match=r"models/draft \(weights b+\), but pair.draft is models/draft \(weights a+\)"):
        check_fits(head(draft=HERE | {"weights": "b" * 64}), "h", draft=HERE | {"role": "pair.draft"})


def test_revisions_on_the_hub_are_different_models():
    main, other = ({"path": "org/m", "name": "org/m", "revision": revision} for revision in ("main", "v2"))
    check_fits(head(draft=main), "h", draft=main)
    with pytest.raises(ValueError, match=r"revision main.*revision v2"):
        check_fits(head(draft=main), "h", draft=other)


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
