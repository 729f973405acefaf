"""Laws of labels and draws, in exact or sampled form."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.labels import labeller, laws
from data_gen.labels.labeller import Labeller
from data_gen.pipeline import worker
from data_gen.pipeline.command import make
from data_gen.responses import in_process
from data_gen.responses.exchange import Exchange, Request
from data_gen.responses.in_process import TargetInProcess
from lm import Sampling
from lm.draws import draw, seed_of, uniforms

SIGMAS = 4.5
"""A count is allowed this many standard deviations: false alarm below 1e-5 each."""


def assert_law(counts: torch.Tensor, probs: torch.Tensor) -> None:
    total = counts.sum()
    spread = (total * probs * (1 - probs)).sqrt()
    assert ((counts - total * probs).abs() <= SIGMAS * spread + 1e-9).all()
    assert (counts[probs == 0] == 0).all()


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6, top_k=3), Sampling(top_p=0.8), Sampling(temperature=0.0)]
)
def test_draft_tokens_follow_the_q_of_the_sampling(sampling):
    logits = torch.tensor([[1.0, 0.3, -0.5, 2.0, -2.0]]).expand(40_000, -1)
    labels, q = laws.label_draft(logits, uniforms(5, 40_000), sampling)
    assert_law(torch.bincount(labels["draft_ids"], minlength=5).float(), q[0])
    torch.testing.assert_close(labels["log_q"].exp(), q.gather(-1, labels["draft_ids"][:, None])[:, 0])
    torch.testing.assert_close(
        labels["log_token_prob"], logits.log_softmax(-1).gather(-1, labels["draft_ids"][:, None])[:, 0]
    )


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda values: sum(values) > 0.01),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_a_token_without_probability_is_never_drawn(weights, uniform):
    probs = torch.tensor([weights]) / sum(weights)
    token = int(draw(probs, torch.tensor([uniform], dtype=torch.float64)))
    assert probs[0, token] > 0


def test_acceptance_prob_from_logs_is_the_ratio_and_zero_where_the_target_has_no_mass():
    log_p, log_q = (
        torch.tensor([math.log(0.1), math.log(0.5), -math.inf]),
        torch.tensor([math.log(0.4), math.log(0.2), -1.0]),
    )
    assert laws.acceptance_prob_of(log_p, log_q).tolist() == pytest.approx([0.25, 1.0, 0.0])


def test_mean_acceptance_prob_over_draws_is_the_acceptance_rate():
    """E over Y ~ q of min(1, p(Y)/q(Y)) = sum of min(p, q); standard error 0.3 / sqrt(40,000) at most."""
    torch.manual_seed(0)
    q_logits, p_logits = torch.randn(1, 6).expand(40_000, -1), torch.randn(1, 6).expand(40_000, -1)
    labels, q = laws.label_draft(q_logits, uniforms(1, 40_000), Sampling())
    log_p, p = laws.label_target(p_logits, labels["draft_ids"], Sampling())
    rate = laws.label_joint(q, p, q_logits=q_logits, p_logits=p_logits)["acceptance_rate"][0]
    assert float(laws.acceptance_prob_of(log_p, labels["log_q"]).mean()) == pytest.approx(
        float(rate), abs=SIGMAS * 0.5 / 200
    )


def requests(*lengths: int) -> list[Request]:
    return [Request(str(number), "", [2, *range(10, 10 + length), 3]) for number, length in enumerate(lengths)]


def target_source(models, **changes) -> TargetInProcess:
    settings = {
        "sampling": Sampling(),
        "vocab_size": 260,
        "eos_ids": frozenset({1}),
        "max_new_tokens": 12,
        "batch_size": 4,
    } | changes
    return TargetInProcess(models["target"], **settings)


def test_greedy_responses_equal_transformers_generate(models):
    prompts = requests(3, 9, 1, 5, 2)
    answers = target_source(models, sampling=Sampling(temperature=0.0)).respond(prompts, 0, lambda count: None)
    for request, answer in zip(prompts, answers, strict=True):
        expected = models["target"].generate(
            torch.tensor([request.prompt_ids]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert answer.response_ids == expected[0, len(request.prompt_ids) :].tolist()


def test_a_response_does_not_depend_on_who_shares_its_batch(models):
    """Many end ids, so that sequences leave early: others take their rows (3), or the cache is cut down again and again
    (8).
    """
    prompts = requests(3, 9, 1, 5, 2, 7, 7, 30)
    ends = frozenset(range(1, 260, 6))
    alone, joining, together = (
        target_source(models, batch_size=size, eos_ids=ends).respond(prompts, 3, lambda count: None)
        for size in (1, 3, 8)
    )
    assert [answer.response_ids for answer in alone] == [answer.response_ids for answer in together]
    assert [answer.response_ids for answer in alone] == [answer.response_ids for answer in joining]
    assert len({len(answer.response_ids) for answer in together}) > 2
    assert all((answer.response_ids[-1] in ends) == (answer.finish_reason == "stop") for answer in together)


def test_states_of_the_source_are_those_of_an_uncached_forward(models):
    ends = frozenset(range(1, 260, 6))
    prompts = requests(3, 9, 1, 5, 2, 7)
    answers = target_source(models, batch_size=4, eos_ids=ends, keeps_states=True).respond(
        prompts, 3, lambda count: None
    )
    for request, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            whole = (
                models["target"].model(torch.tensor([request.prompt_ids + answer.response_ids])).last_hidden_state[0]
            )
        torch.testing.assert_close(answer.states, whole[len(request.prompt_ids) - 1 : -1], rtol=1e-4, atol=1e-4)


def test_responses_follow_the_targets_law(models):
    """All 9 two-token responses under top-k 3, 6,000 samples of one prompt, against probabilities of uncached
    forwards.
    """
    sampling, prompt = Sampling(top_k=3), [2, 40, 41, 3]
    count = 6000
    source = target_source(models, sampling=sampling, max_new_tokens=2, batch_size=1000, eos_ids=frozenset())
    answers = source.respond([Request("a", "", prompt)] * count, 11, lambda done: None)
    with torch.no_grad():
        first = sampling.probs(models["target"](torch.tensor([prompt])).logits[0, -1, :260])
        law = {}
        for one in first.nonzero()[:, 0].tolist():
            second = sampling.probs(models["target"](torch.tensor([[*prompt, one]])).logits[0, -1, :260])
            law |= {(one, two): float(first[one] * second[two]) for two in second.nonzero()[:, 0].tolist()}
    counts = dict.fromkeys(law, 0)
    for answer in answers:
        counts[tuple(answer.response_ids)] += 1
    assert_law(torch.tensor(list(counts.values())).float(), torch.tensor(list(law.values())))


def test_labelling_never_holds_more_than_a_bounded_chunk(models, monkeypatch):
    """Every [positions, vocabulary] matrix that reaches the label functions fits the bound; the columns do not depend
    on it.
    """
    num_bytes = []
    label_draft = labeller.label_draft

    def watch(q_logits, uniform, sampling):
        num_bytes.append(q_logits.numel() * 4)
        return label_draft(q_logits, uniform, sampling)

    monkeypatch.setattr(labeller, "label_draft", watch)
    monkeypatch.setattr(
        labeller.forwards, "chunk_rows", lambda vocab_size, chunk_mb: max(1, chunk_mb * 1024 // (4 * vocab_size))
    )
    exchanges = [Exchange(str(number), "", [2, 3], list(range(10, 10 + number)), "length") for number in range(1, 12)]
    uniform = {"uniform": uniforms(0, sum(range(1, 12)))}
    results = [
        Labeller(
            draft=models["draft"],
            target=models["target"],
            sampling=Sampling(),
            vocab_size=260,
            batch_size=4,
            chunk_mb=kilobytes,
            feature_dtype=torch.float32,
        )
        .label(exchanges, uniform, with_hidden=True, progress=lambda n: None)
        .columns
        for kilobytes in (4, 1000)
    ]
    assert max(num_bytes[: len(num_bytes) // 2]) <= 4 * 1024
    for name, values in results[0].items():
        torch.testing.assert_close(values, results[1][name], msg=lambda m, name=name: f"{name}: {m}")


def test_seeds_differ_between_stages_splits_and_shards():
    seeds = {
        seed_of(0, stage, split, index)
        for stage in ("response", "draft", "mixing")
        for split in ("train", "dev")
        for index in range(50)
    }
    assert len(seeds) == 300
    assert max(seeds) < 2**63


def test_every_draw_of_a_run_has_a_seed_of_its_own(toy_config, monkeypatch):
    """Three streams of uniforms per shard (responses, draft tokens, coins), and five shards; no stream is used twice in
    a run.
    """
    seeds = []

    def record(seed, *shape):
        seeds.append(seed)
        return uniforms(seed, *shape)

    for module in (in_process, worker):
        monkeypatch.setattr(module, "uniforms", record)
    make(toy_config)
    assert len(seeds) == 3 * 5
    assert len(set(seeds)) == len(seeds)
