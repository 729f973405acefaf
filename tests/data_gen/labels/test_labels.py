"""Laws of labels and draws, in exact or sampled form, also where rotary frequencies change with the length of a text;
and those of a feature draft: each draft is one that decoding makes, with the labels of its own tokens.
"""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import ModelSource
from data_gen.labels import labeller, laws
from data_gen.labels.chains import ChainLabeller
from data_gen.labels.labeller import Labeller
from data_gen.labels.states import RolloutStates, Text
from data_gen.pipeline import worker
from data_gen.pipeline.command import make
from data_gen.responses import target as sources
from data_gen.responses.exchange import Exchange, Request
from data_gen.responses.target import TargetInProcess
from data_gen.store.rows import Layout, to_safetensors
from heads.batches.features import FeatureShard, with_states
from lm import Sampling, acceptance_rate, entropy
from lm.draws import draw, uniforms
from store.shards import list_shards, write_shard
from tests.conformance.mtp import FAMILIES as MTP
from tests.data_gen.on_disk import with_data
from tests.toys.longrope import model_of, text_of
from tests.toys.random_drafts import BLOCKS, KINDS, VOCAB, beside, draft, target_of
from tests.toys.random_pairs import greedy_of

LENGTH, EOS, WARM = 3, 4, Sampling(temperature=1.3)
EXCHANGES = [Exchange("a", "", [1, 2, 3], [5, 0, 6, 2, 2], "length"), Exchange("b", "", [6, 1], [3, 3, 4], "stop")]
CHANCE = uniforms(3, 8, LENGTH)
every_kind = pytest.mark.parametrize("kind", [*KINDS, *BLOCKS, *MTP])


def labelled(kind: str, exchanges: list[Exchange] = EXCHANGES, draft_every: int = 1) -> SimpleNamespace:
    how = {"vocab_size": VOCAB, "eos_ids": frozenset({EOS}), "draft_length": LENGTH, "draft_every": draft_every}
    how |= {"chunk_mb": 64, "sampling": WARM}
    labeller = ChainLabeller(draft=draft(kind), target=target_of(kind), **how)
    drafts = labeller.label(exchanges, CHANCE, progress=lambda count: None)
    lengths, left = [], drafts.columns.pop("draft_lengths").tolist()
    for num_tokens in drafts.layout.lengths:
        lengths.append([])
        while sum(lengths[-1]) < num_tokens:
            lengths[-1].append(left.pop(0))
    return SimpleNamespace(columns=drafts.columns, broken=drafts.broken, rows=drafts.of_rows, lengths=lengths)


def hidden_states_along(kind: str, drafts: SimpleNamespace, draft_every: int = 1) -> dict[str, torch.Tensor]:
    """The states of the drafts of both timings, from the labels alone."""
    ids = drafts.columns["draft_ids"].split(list(map(sum, drafts.lengths)))
    texts = [
        Text(
            exchange.prompt_ids, exchange.response_ids, of_text, torch.ones(len(of_text)).bool(), torch.tensor(lengths)
        )
        for exchange, of_text, lengths in zip(EXCHANGES, ids, drafts.lengths, strict=True)
    ]
    states = RolloutStates(draft(kind), target_of(kind), draft_every=draft_every)
    return {timing: states(texts, timing) for timing in ("drawn", "fed")}


def expected(kind: str, exchange: Exchange, start: int, uniform: torch.Tensor) -> list[dict[str, object]]:
    """One draft, token by token beside the target."""
    tapped, model = beside(target_of(kind), draft(kind))
    committed = [*exchange.prompt_ids, *exchange.response_ids[:start]]
    tapped.feed(committed[:-1])
    steps, tokens = [], []
    logits = model.feed(committed)
    for place in range(min(LENGTH, len(exchange.response_ids) - start)):
        q, drawn = WARM.probs(logits), model.hidden[0]
        p = WARM.probs(target_of(kind)(torch.tensor([[*committed, *tokens]]), use_cache=False).logits[:, -1])
        token = draw(q, uniform[place : place + 1])
        tokens.append(int(token))
        numbers = {
            "draft_ids": int(token),
            "acceptance_prob": min(1.0, float(p[0, token] / q[0, token])),
            "log_q": float(q[0, token].log()),
            "log_p": float(p[0, token].log()),
            "entropy": float(entropy(logits)),
            "acceptance_rate": float(acceptance_rate(q, p)),
        }
        logits = model.feed(tokens[-1:])
        steps.append({"numbers": numbers, "drawn": drawn, "fed": model.hidden[0]})
        if tokens[-1] == EOS:
            break
    return steps


@torch.no_grad()
@every_kind
def test_every_token_has_the_labels_and_states_of_its_own_draft_also_where_half_of_the_drafts_are_made(kind):
    drafts, at, first = labelled(kind), 0, 0
    hidden = hidden_states_along(kind, drafts)
    for exchange, lengths in zip(EXCHANGES, drafts.lengths, strict=True):
        for start, length in enumerate(lengths, int(kind in BLOCKS)):  # no block begins at a prompt's last token
            steps = expected(kind, exchange, start, CHANCE[first + start])
            assert length == len(steps)
            assert drafts.rows["acceptance_prob"][first + start] == drafts.columns["acceptance_prob"][at]
            for place, step in enumerate(steps):
                for name, value in step["numbers"].items():
                    found = float(drafts.columns[name][at + place])
                    assert found == pytest.approx(value, abs=4e-6), (name, start, place)
                for timing in ("drawn", "fed"):
                    assert torch.allclose(hidden[timing][at + place], step[timing], atol=1e-6)
            at += length
        first += len(exchange.response_ids)
    assert at == len(drafts.columns["draft_ids"])
    assert max(map(max, drafts.lengths)) == LENGTH
    half, lengths = labelled(kind, draft_every=2), torch.tensor([length for row in drafts.lengths for length in row])
    starts = torch.tensor([start for row in drafts.lengths for start in range(len(row))])
    is_kept = (starts % 2 == 0).repeat_interleave(lengths)
    assert half.lengths == [row[::2] for row in drafts.lengths]
    for name, values in half.columns.items():
        torch.testing.assert_close(values, drafts.columns[name][is_kept])
    for timing, states in hidden_states_along(kind, half, draft_every=2).items():
        torch.testing.assert_close(states, hidden[timing][is_kept])
    for name, values in half.rows.items():
        torch.testing.assert_close(values, drafts.rows[name])


def test_drafts_that_are_made_one_by_one_are_the_same_and_no_row_is_a_shard_of_none(monkeypatch):
    together = labelled("eagle")
    monkeypatch.setattr("data_gen.labels.chains.DRAFTS_AT_ONCE", 1)
    apart = labelled("eagle")
    assert apart.lengths == together.lengths
    assert all(torch.allclose(apart.columns[name], values, atol=1e-6) for name, values in together.columns.items())
    none = labelled("glide", exchanges=[])
    assert (none.lengths, none.columns["draft_ids"].shape) == ([], (0,))
    assert safetensors.torch.load(to_safetensors(none.columns, Layout(())))["row_offsets"].tolist() == [0]


@pytest.mark.parametrize(("kind", "starts"), [("eagle", (0, 1)), ("eagle", (0, 2)), ("rnn", (1, 1)), ("rnn", (1, 2))])
def test_a_shard_has_the_drafts_of_each_row_and_heads_read_them_as_its_parts(kind, starts, tmp_path):
    drafts, path = labelled(kind, draft_every=starts[1]), tmp_path / "labels" / "train-00000.safetensors"
    lengths = torch.tensor([length for row in drafts.lengths for length in row])
    layout = Layout(tuple(map(sum, drafts.lengths)))
    written = to_safetensors(drafts.columns | {"draft_lengths": lengths}, layout)
    assert torch.equal(safetensors.torch.load(written)["target_prob"], drafts.columns["log_p"].float().exp())
    write_shard(path, written, rows=len(EXCHANGES), tokens=layout.num_tokens)
    shard = FeatureShard(path, path, states={"drawn": None, "fed": None}, columns=("entropy",), draft_starts=starts)
    for timing in ("drawn", "fed"):
        for first, last in ((0, 2), (1, 2)):
            rows = shard.read(first, last, has_states=False)[timing]
            tokens = torch.cat([row.numbers["token"] for row in rows]).tolist()
            assert [row.row_lengths.tolist() for row in rows] == drafts.lengths[first:last]
            responses = with_states(rows, torch.zeros(len(tokens), 1)).response_lengths
            assert responses.tolist() == list(map(sum, drafts.lengths[first:last]))
            assert tokens == drafts.columns["draft_ids"].tolist()[-len(tokens) :]
            for exchange, row in zip(EXCHANGES[first:last], rows, strict=True):
                begins = range(starts[0], len(exchange.response_ids), starts[1])
                lengths = zip(begins, row.row_lengths.tolist(), strict=True)
                before = [begin + index for begin, length in lengths for index in range(length)]
                assert row.numbers["text_position"].expm1().tolist() == pytest.approx(before, rel=1e-5)


@every_kind
def test_a_response_that_a_model_cannot_read_is_broken_and_leaves_the_others_as_they_are(kind, monkeypatch):
    """The target's embedding of a token that the first response reads, and nothing of the second, is NaN."""
    first, second = EXCHANGES[0], Exchange("b", "", [6, 1], [3], "stop")
    whole = labelled(kind, [first, second])
    num_drafts, num_tokens = len(first.response_ids), sum(whole.lengths[0])
    seen = {*second.prompt_ids, *second.response_ids, *whole.columns["draft_ids"][num_tokens:].tolist()}
    token = next(token for token in first.prompt_ids + first.response_ids[:-1] if token not in seen)
    broken = deepcopy(target_of(kind))
    broken.get_input_embeddings().weight.data[token] = float("nan")
    monkeypatch.setitem(globals(), "target_of", lambda kind: broken)
    rest = labelled(kind, [first, second])
    assert list(rest.broken) == [0]
    assert "logits along the drafts of the response" in rest.broken[0]
    assert rest.lengths == whole.lengths[1:]
    for name, values in rest.columns.items():
        torch.testing.assert_close(values, whole.columns[name][num_tokens:], rtol=0, atol=0)
    for name, values in rest.rows.items():
        torch.testing.assert_close(values, whole.rows[name][num_drafts:], rtol=0, atol=0)


SIGMAS = 4.5
"""A count is allowed this many standard deviations: false alarm below 1e-5 each."""
ENDS = frozenset(range(1, 260, 6))
"""Many end ids, so that sequences leave a batch early."""


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
    ids = labels["draft_ids"][:, None]
    assert_law(torch.bincount(ids[:, 0], minlength=5).float(), q[0])
    torch.testing.assert_close(labels["log_q"].exp(), q.gather(-1, ids)[:, 0])
    torch.testing.assert_close(labels["log_token_prob"], logits.log_softmax(-1).gather(-1, ids)[:, 0])


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda values: sum(values) > 0.01),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_a_token_without_probability_is_never_drawn(weights, uniform):
    probs = torch.tensor([weights]) / sum(weights)
    assert probs[0, int(draw(probs, torch.tensor([uniform], dtype=torch.float64)))] > 0


def test_mean_acceptance_prob_over_draws_is_the_acceptance_rate():
    """E over Y ~ q of min(1, p(Y)/q(Y)) = sum of min(p, q); standard error 0.3 / sqrt(40,000) at most."""
    q_logits, p_logits = torch.randn(1, 6).expand(40_000, -1), torch.randn(1, 6).expand(40_000, -1)
    labels, q = laws.label_draft(q_logits, uniforms(1, 40_000), Sampling())
    of_target = laws.label_target(p_logits.softmax(-1), labels, q)
    rate = float(of_target["acceptance_rate"][0])
    assert float(of_target["acceptance_prob"].mean()) == pytest.approx(rate, abs=SIGMAS * 0.5 / 200)


def requests(*lengths: int) -> list[Request]:
    return [Request(str(number), "", [2, *range(10, 10 + length), 3]) for number, length in enumerate(lengths)]


def answers(models, prompts: list[Request], seed: int, **changes):
    """What the target responds."""
    how = {"sampling": Sampling(), "vocab_size": 260, "eos_ids": ENDS, "max_new_tokens": 12, "batch_size": 4}
    return TargetInProcess(models["target"], **how | changes).respond(prompts, seed, lambda count: None)


def test_greedy_responses_equal_transformers_generate(models):
    prompts = requests(3, 9, 1, 5, 2)
    greedy = answers(models, prompts, 0, sampling=Sampling(temperature=0.0), eos_ids=frozenset({1}))
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 1, "pad_token_id": 0}
    for request, answer in zip(prompts, greedy, strict=True):
        expected = models["target"].generate(torch.tensor([request.prompt_ids]), **how)
        assert answer.response_ids == expected[0, len(request.prompt_ids) :].tolist()


def test_a_response_does_not_depend_on_who_shares_its_batch(models):
    """Others take the rows of sequences that leave early (3), or the cache is cut down again and again (8)."""
    prompts = requests(3, 9, 1, 5, 2, 7, 7, 30)
    alone, joining, together = (answers(models, prompts, 3, batch_size=size) for size in (1, 3, 8))
    for others in (together, joining):
        assert [answer.response_ids for answer in alone] == [answer.response_ids for answer in others]
    assert len({len(answer.response_ids) for answer in together}) > 2
    assert all((answer.response_ids[-1] in ENDS) == (answer.finish_reason == "stop") for answer in together)


@torch.no_grad()
def test_responses_follow_the_targets_law(models):
    """All 9 two-token responses under top-k 3, 6,000 samples of one prompt, against uncached forwards."""
    sampling, prompt = Sampling(top_k=3), [2, 40, 41, 3]
    how = {"sampling": sampling, "max_new_tokens": 2, "batch_size": 1000, "eos_ids": frozenset()}
    found = answers(models, [Request("a", "", prompt)] * 6000, 11, **how)
    first = sampling.probs(models["target"](torch.tensor([prompt])).logits[0, -1, :260])
    law = {}
    for one in first.nonzero()[:, 0].tolist():
        second = sampling.probs(models["target"](torch.tensor([[*prompt, one]])).logits[0, -1, :260])
        law |= {(one, two): float(first[one] * second[two]) for two in second.nonzero()[:, 0].tolist()}
    counts = dict.fromkeys(law, 0)
    for answer in found:
        counts[tuple(answer.response_ids)] += 1
    assert_law(torch.tensor(list(counts.values())).float(), torch.tensor(list(law.values())))


def test_labelling_never_holds_more_than_a_bounded_chunk(models, monkeypatch):
    """Every [positions, vocabulary] matrix that reaches the label functions fits the bound, which changes no column."""
    num_bytes, label_draft = [], labeller.label_draft

    def watch(q_logits, *how):
        num_bytes.append(q_logits.numel() * 4)
        return label_draft(q_logits, *how)

    def rows_of_kilobytes(vocab_size, chunk_mb):
        return max(1, chunk_mb * 1024 // (4 * vocab_size))

    monkeypatch.setattr(labeller, "label_draft", watch)
    monkeypatch.setattr(labeller.forwards, "chunk_rows", rows_of_kilobytes)
    exchanges = [Exchange(str(number), "", [2, 3], list(range(10, 10 + number)), "length") for number in range(1, 12)]
    drawn = {"uniform": uniforms(0, sum(range(1, 12)))}
    how = {"sampling": Sampling(), "vocab_size": 260, "batch_size": 4}
    small, large = (
        Labeller(**models, **how, chunk_mb=kilobytes).label(exchanges, drawn, progress=lambda n: None)
        for kilobytes in (4, 1000)
    )
    assert max(num_bytes[: len(num_bytes) // 2]) <= 4 * 1024
    for name, values in small.columns.items():
        torch.testing.assert_close(values, large.columns[name], msg=lambda m, name=name: f"{name}: {m}")


def test_every_draw_of_a_run_has_a_seed_of_its_own(toy_config, monkeypatch):
    """Three streams of uniforms per shard (responses, draft tokens, coins), and five shards; none is used twice."""
    seeds = []
    for module in (sources, worker):
        monkeypatch.setattr(module, "uniforms", lambda seed, *shape: seeds.append(seed) or uniforms(seed, *shape))
    make(toy_config)
    assert len(seeds) == len(set(seeds)) == 3 * 5


GREEDY = Sampling(temperature=0.0)


@pytest.mark.slow
def test_an_ended_sequence_whose_place_grows_beyond_the_bound_changes_no_other():
    """One prompt of 9 tokens ends when nobody waits; beside seven that began later, its place would grow to 17."""
    eos_ids = frozenset(range(3, 12))
    by_end: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}
    for length, seed in ((length, seed) for length in (9, 8, 6) for seed in range(120)):
        prompt = text_of(length, seed=seed)
        tokens = greedy_of(model_of("phi3"), prompt, 8)
        end = next((place for place, token in enumerate(tokens) if token in eos_ids), 8)
        by_end.setdefault((length, end), []).append((prompt, tokens[: end + 1]))
    texts = [*by_end[9, 2][:1], *by_end[8, 1][:7], *by_end[6, 8][:7]]
    assert len(texts) == 15
    prompts, expected = zip(*texts, strict=True)
    settings = {"vocab_size": 40, "eos_ids": eos_ids, "max_new_tokens": 8, "batch_size": 8}
    requests = [Request(str(number), "", prompt) for number, prompt in enumerate(prompts)]
    responses = TargetInProcess(model_of("phi3"), GREEDY, **settings).respond(requests, 0, lambda count: None)
    assert [response.response_ids for response in responses] == list(expected)


def test_a_run_whose_texts_may_cross_the_bound_is_refused_before_any_prompt_is_asked(toy_config, tmp_path):
    shutil.copytree(toy_config.pair.target.path, tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 64}
    rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | factors}
    path.write_text(json.dumps(json.loads(path.read_text()) | rope))
    config = replace(toy_config, pair=replace(toy_config.pair, target=ModelSource(path=str(tmp_path / "target"))))
    complaint = r"max_new_tokens is 70, and LlamaForCausalLM changes .* beyond 64 .*lower either setting"
    with pytest.raises(ValueError, match=complaint) as refusal:
        make(config)
    assert "\n" not in str(refusal.value)
    assert not list(Path(config.data.dir).rglob("*.parquet"))
    make(with_data(config, max_new_tokens=4))  # the remedy, in the same folder
    assert list_shards(config.data.dir, "train")
