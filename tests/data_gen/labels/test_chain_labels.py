"""Data of a feature draft: each draft is one that decoding makes, with the labels of its own tokens."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from data_gen.labels.chains import ChainLabeller
from data_gen.responses.exchange import Exchange
from data_gen.store.labels import Layout, to_safetensors
from heads.batches.features import FeatureShard
from lm import CachedModel, Sampling, acceptance_rate, entropy, feature_model
from lm.draws import draw, uniforms
from lm.features.recorder import FeatureRecorder
from store.shards import write_shard
from tests.conformance.mtp import FAMILIES as MTP
from tests.toys.random_drafts import BLOCKS, KINDS, VOCAB, draft, target_of

LENGTH, EOS, WARM = 3, 4, Sampling(temperature=1.3)
EXCHANGES = [Exchange("a", "", [1, 2, 3], [5, 0, 6, 2, 2], "length"), Exchange("b", "", [6, 1], [3, 3, 4], "stop")]
CHANCE = uniforms(3, 8, LENGTH)
every_kind = pytest.mark.parametrize("kind", [*KINDS, *BLOCKS, *MTP])


def labelled(kind: str, exchanges: list[Exchange] = EXCHANGES, draft_every: int = 1) -> SimpleNamespace:
    how = {"vocab_size": VOCAB, "eos_ids": frozenset({EOS}), "draft_length": LENGTH, "draft_every": draft_every}
    how |= {"chunk_mb": 64, "feature_dtype": torch.float64, "sampling": WARM}
    labeller = ChainLabeller(draft=draft(kind), target=target_of(kind), **how)
    drafts = labeller.label(exchanges, CHANCE, timings=("fed", "drawn"), progress=lambda count: None)
    (columns, broken), rows, lengths = drafts
    return SimpleNamespace(columns=columns, broken=broken, rows=rows, lengths=lengths)


def expected(kind: str, exchange: Exchange, start: int, uniform: torch.Tensor) -> list[dict[str, object]]:
    """One draft, token by token beside the target."""
    tapped = CachedModel(target_of(kind), recorder=FeatureRecorder(target_of(kind), draft(kind)))
    model = feature_model(draft(kind), tapped)
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
    for exchange, lengths in zip(EXCHANGES, drafts.lengths, strict=True):
        for start, length in enumerate(lengths, int(kind in BLOCKS)):  # no block begins at a prompt's last token
            steps = expected(kind, exchange, start, CHANCE[first + start])
            assert length == len(steps)
            assert drafts.rows["acceptance_prob"][first + start] == drafts.columns["acceptance_prob"][at]
            for place, step in enumerate(steps):
                for name, value in step["numbers"].items():
                    found = float(drafts.columns[name][at + place])
                    assert found == pytest.approx(value, abs=1e-6), (name, start, place)
                for timing in ("drawn", "fed"):
                    assert torch.allclose(drafts.columns[timing][at + place], step[timing], atol=1e-6)
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
    for name, values in half.rows.items():
        torch.testing.assert_close(values, drafts.rows[name])


def test_drafts_that_are_made_one_by_one_are_the_same_and_no_row_is_a_shard_of_none(monkeypatch):
    together = labelled("eagle")
    monkeypatch.setattr("data_gen.labels.chains._DRAFTS_AT_ONCE", 1)
    apart = labelled("eagle")
    assert apart.lengths == together.lengths
    assert all(torch.allclose(apart.columns[name], values, atol=1e-6) for name, values in together.columns.items())
    none = labelled("glide", exchanges=[])
    assert (none.lengths, none.columns["fed"].shape) == ([], (0, 16))
    assert safetensors.torch.load(to_safetensors(none.columns, Layout(())))["row_offsets"].tolist() == [0]


@pytest.mark.parametrize(("kind", "starts"), [("eagle", (0, 1)), ("eagle", (0, 2)), ("rnn", (1, 1)), ("rnn", (1, 2))])
def test_a_shard_has_the_drafts_of_each_row_and_heads_read_them_as_its_parts(kind, starts, tmp_path):
    drafts, path = labelled(kind, draft_every=starts[1]), tmp_path / "labels" / "train-00000.safetensors"
    lengths = torch.tensor([length for row in drafts.lengths for length in row])
    layout = Layout(tuple(map(sum, drafts.lengths)))
    written = to_safetensors(drafts.columns | {"draft_lengths": lengths}, layout)
    assert torch.equal(safetensors.torch.load(written)["target_prob"], drafts.columns["log_p"].float().exp())
    write_shard(path, written, rows=len(EXCHANGES), tokens=layout.num_tokens)
    shard = FeatureShard(path, {"drawn": None, "fed": None}, ("entropy",), draft_starts=starts)
    for timing in ("drawn", "fed"):
        for first, last in ((0, 2), (1, 2)):
            rows = [row for (row,) in shard.read(first, last)[timing]]
            tokens = torch.cat([row.numbers["token"] for row in rows]).tolist()
            assert [row.row_lengths.tolist() for row in rows] == drafts.lengths[first:last]
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
