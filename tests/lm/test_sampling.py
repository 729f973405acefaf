"""One transform from logits to probabilities: transformers' law, temperature 0 as its limit, float32 or wider."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, RepetitionPenaltyLogitsProcessor
from transformers import TemperatureLogitsWarper as Temperature
from transformers import TopKLogitsWarper as TopK
from transformers import TopPLogitsWarper as TopP

from lm import Sampling, cross_entropy, entropy
from lm.draws import _inverted_on_cpu, inverted
from lm.sampling import QuickTopP
from tests.toys.enumeration import seeded

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5], [0.0, 0.1, 3.0, 0.2, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.7), Sampling(1.3, top_k=2), Sampling(top_p=0.8), Sampling(0.9, top_k=4, top_p=0.6)],
)
def test_probs_are_those_that_transformers_generate_draws_from(sampling):
    sizes = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=1))
    settings = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    settings |= {"do_sample": True, "max_new_tokens": 1}
    settings["custom_generate"] = lambda model, ids, logits_processor, **_: logits_processor
    processors = model.generate(torch.tensor([[1]]), **settings)
    expected = processors(torch.tensor([[1], [2]]), LOGITS.clone()).softmax(-1)
    torch.testing.assert_close(sampling.probs(LOGITS), expected, rtol=0, atol=1e-15)


def test_temperature_zero_is_one_hot_and_the_limit_of_small_temperatures():
    greedy = Sampling(temperature=0.0).probs(LOGITS)
    assert greedy.tolist() == [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]
    torch.testing.assert_close(Sampling(temperature=1e-3).probs(LOGITS), greedy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_upcast_before_the_softmax(dtype):
    logits = LOGITS.to(dtype)
    probs = Sampling().probs(logits)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, logits.float().softmax(-1))
    assert Sampling().probs(logits, torch.float64).dtype == torch.float64


def test_impossible_tokens_stay_impossible():
    logits = LOGITS.clone()
    logits[:, 1] = -torch.inf
    for sampling in (Sampling(), Sampling(0.5, top_k=3), Sampling(top_p=0.9), Sampling(0.0)):
        assert not sampling.probs(logits)[:, 1].any()


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"temperature": -0.1}, "temperature"), ({"top_k": 0}, "top_k"), ({"top_p": 0.0}, "top_p"),
     ({"top_p": 1.2}, "top_p"), ({"temperature": torch.nan}, "temperature"), ({"temperature": 1e-300}, "set it to 0")],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**settings)


def test_entropies_are_in_nats_and_survive_impossible_tokens():
    p, q = (logits.softmax(-1) for logits in LOGITS)
    assert float(entropy(LOGITS[0])) == pytest.approx(float(-(p * p.log()).sum()))
    assert float(cross_entropy(LOGITS[1], LOGITS[0])) == pytest.approx(float(-(q * p.log()).sum()))
    assert float(cross_entropy(LOGITS[0], LOGITS[0])) == pytest.approx(float(entropy(LOGITS[0])))
    assert float(entropy(torch.tensor([0.0, 0.0, -torch.inf]))) == pytest.approx(0.6931, abs=1e-4)
    assert entropy(torch.tensor([500.0, 0.0])) >= 0


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_top_p_from_the_likeliest_tokens_is_that_of_transformers_bit_by_bit(top_p):
    generator = seeded()
    flat, peaked = (torch.randn(8, 2000, generator=generator) * scale for scale in (1, 6))
    tied = peaked.to(torch.bfloat16).float()
    for logits in (flat, peaked, tied, torch.cat([peaked, flat, tied]), torch.zeros(2, 2000)):
        assert torch.equal(QuickTopP(top_p)(None, logits), TopP(top_p)(None, logits))


def test_top_p_sorts_only_the_rows_that_its_likeliest_tokens_leave_open(monkeypatch):
    sorted_rows, sort = [], torch.sort
    monkeypatch.setattr(torch, "sort", lambda rows, **kinds: sorted_rows.append(len(rows)) or sort(rows, **kinds))
    logits = torch.randn(3, 2000, generator=seeded()) * torch.tensor([[6.0], [1.0], [6.0]])
    QuickTopP(0.9)(None, logits)
    assert sorted_rows == [1]
    QuickTopP(0.9)(None, logits[[0, 2]])
    assert sorted_rows == [1]


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        ([], Sampling()),
        ([Temperature(0.7), TopK(5), TopP(0.9)], Sampling(0.7, 5, 0.9)),
        ([TopP(0.9)], Sampling(top_p=0.9)),
        ([TopK(5), Temperature(0.7)], None),
        ([TopP(0.9, min_tokens_to_keep=2)], None),
        ([RepetitionPenaltyLogitsProcessor(1.3), Temperature(0.7)], None),
    ],
)
def test_a_list_of_warpers_alone_is_a_sampling(processors, expected):
    assert Sampling.of(processors) == expected


@pytest.mark.parametrize("width", [8192, 8193, 50257])
def test_two_steps_draw_what_one_step_draws(width):
    law = torch.randn(width, generator=seeded()).mul(3).softmax(-1)
    law[::3] = 0
    for uniform in [*torch.rand(300, dtype=torch.float64).tolist(), 0.0, 1 - 2.0**-53]:
        token = _inverted_on_cpu(law, uniform)
        assert law[token] > 0
        assert token == int(inverted(law, uniform))
    assert _inverted_on_cpu(law.index_fill(0, torch.tensor([5]), torch.nan), 0.5) == width
