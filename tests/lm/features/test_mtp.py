"""A target's own MTP layer is transformers' MtpModel, and what cannot be read is refused with its true reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from configs.schema import ModelSource, PairConfig
from data_gen.store.manifest import describe_model
from lm import load_model
from lm.cache import growing_cache
from lm.features.loading import feature_draft_of
from lm.features.released import released_layout_of, width_of
from tests.conformance.mtp import LAYOUTS, draft, target, write

TEXT = torch.tensor([[1, 5, 2, 6, 0, 3]])


@pytest.mark.parametrize("family", LAYOUTS)
@torch.no_grad()
def test_states_and_logits_are_those_of_transformers_mtp_model(family, monkeypatch):
    ours, model = draft(family), target(family)
    pattern = r"^mtp\..*|^model\.layers\.2\..*"  # the class names the layer of the released size
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [pattern])
    theirs = MtpModel.from_pretrained(model)
    states = model.base_model(TEXT).last_hidden_state[:, :-1]
    caches, positions = (growing_cache(8), MtpCache(config=model.config.get_mtp_config())), torch.arange(5)[None]
    tokens = TEXT[:, 1:]
    given = states
    for _ in range(4):
        outputs = ours(tokens, ours.entering(given), positions, cache=caches[0])
        states = theirs.forward_layer(0, states, positions + 1, caches[1], input_ids=tokens)
        torch.testing.assert_close(outputs.hidden, states, rtol=0, atol=1e-5)
        logits = theirs._project_to_logits(states)
        torch.testing.assert_close(ours.logits(outputs.hidden), logits, rtol=0, atol=1e-5)
        tokens, positions = logits[:, -1:].argmax(-1), positions[:, -1:] + 1
        given, states = outputs.states[:, -1:], states[:, -1:]


def test_the_word_mtp_names_the_target_s_own_layer():
    path = target("qwen3_next").name_or_path
    pair = PairConfig(target=ModelSource(path=path, revision="main"), draft=ModelSource(path="mtp"))
    assert (pair.draft.path, pair.draft.revision) == (f"{path}#mtp", "main")
    assert (released_layout_of(pair.draft), width_of(pair.draft)) == ("mtp", draft("qwen3_next").hidden_size)
    ours, whole = describe_model(pair.draft), describe_model(pair.target)
    assert {key for key in whole if ours[key] != whole[key]} == {"name", "weights"}


ENORM = "model.layers.2.enorm.weight"
SECOND = ENORM.replace("2", "3")


@pytest.mark.parametrize(
    ("family", "lacking", "added", "keys", "message"),
    [
        # what the names of tensors that lack begin with, tensors that are added, other keys of config.json
        ("qwen3_next", "mtp.", {}, {}, "has 0 MTP layers"),
        ("deepseek_v3", None, {SECOND: torch.ones(16).double()}, {}, "has 2 MTP layers .*, and one is read"),
        ("deepseek_v3", ENORM, {}, {}, "lacks 1 tensors, first layers.0.enorm.weight"),
        ("qwen3_next", None, {"mtp.scale": torch.ones(1)}, {}, "also has 1 tensors, first"),
        ("qwen3_next", None, {}, {"mtp_layer_types": ["sliding_attention"]}, "its layer has sliding_attention"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(family, lacking, added, keys, message, tmp_path):
    path = write(family, tmp_path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if lacking is None or not name.startswith(lacking)}
    save_file(kept | added, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | keys))
    model = load_model(ModelSource(path=str(path), dtype="float64"))
    for source, reason in ((f"{path}#mtp", message), ("elsewhere#mtp", "is the MTP layer of elsewhere")):
        with pytest.raises(ValueError, match=reason) as refusal:
            feature_draft_of(ModelSource(path=source), model)
        assert "\n" not in str(refusal.value)
