"""A recorded trace holds what its models say of each token after its own prefix (law 4.10), on disk and in parts."""

import json
import shutil
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit

from data_gen.responses.exchange import Exchange
from decode.experiment import Experiment
from decode.policies import DSparkConfidence, Entropy
from decode.policies.scores import ScoreHead
from evaluation.report.plots import bins_of, reliability_plot
from evaluation.traces.coupling import Recorder
from evaluation.traces.disk import ShardKey, read_trace, write_trace
from evaluation.traces.recording import record_trace, trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import InputTensors, Trace, TraceRow, join_traces, whole_piece
from heads import AcceptanceHead
from heads.model.inputs import STANDARD
from lm import CachedModel, Sampling, acceptance_prob, acceptance_rate, entropy, residual_probs
from lm.draws import draw, uniforms
from tests.conformance.mtp import FAMILIES as MTP
from tests.evaluation.commands import config_with, spelt
from tests.evaluation.traces import forms
from tests.evaluation.traces.forms import EOS, LENGTH, LIMIT, PROMPT, WARM, model_head, responses, traced
from tests.toys import longrope, small_pair
from tests.toys.random_drafts import BLOCKS, KINDS, beside, draft, feature_head, target_of
from tests.toys.small_pair import PROMPTS, VOCAB, model

SHARP = Sampling(temperature=0.8, top_k=8)
NUM = 150


def prefixes(trace: Trace) -> list[list[int]]:
    """What precedes each drawn token, in flat order."""
    result: list[list[int]] = []
    for row in trace.rows:
        result += [[*row.prompt_ids, *row.response_ids[:position]] for position in range(len(row.response_ids))]
    for at, length in enumerate(trace.branch_lengths):
        tokens = trace.token[trace.first_drawn[at] : trace.first_drawn[at] + length].tolist()
        result += [[*result[at], *tokens[:depth]] for depth in range(length)]
    return result


def alone(which: torch.nn.Module, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and hidden state of one model over one sequence, with nothing batched or cached."""
    cached = CachedModel(which)
    cached.keep_hidden()
    logits = cached.feed(ids)[-1]
    return logits, cached.hidden[-1]


@pytest.fixture(scope="module")
def warm() -> Trace:
    return forms.unscored(traced("model", SHARP))


def test_every_signal_and_score_of_path_and_branches_is_that_of_a_forward_over_its_own_prefix(warm):
    part = warm.select(range(6))
    before, scores = prefixes(part), {timing: part.logit(model_head(timing)) for timing in ("fed", "drawn")}
    for index, prefix in enumerate(before):
        token = torch.tensor([int(part.token[index])])
        logits, hidden = alone(model(2), prefix)
        q, p = SHARP.probs(logits)[None], SHARP.probs(alone(model(1, 2), prefix)[0])[None]
        expected = {
            "entropy": entropy(logits),
            "max_prob": logits.softmax(-1).max(),
            "log_token_prob": logits.log_softmax(-1)[token],
            "logit_token_prob": logits.double().softmax(-1)[token].logit(),
            "logit_max_prob": logits.double().softmax(-1).max().logit(),
            "acceptance_prob": acceptance_prob(token, q, p),
        }
        for name, value in expected.items():
            assert part.signal(name)[index] == pytest.approx(float(value), abs=2e-5), (name, index)
        assert torch.allclose(part.inputs().hidden[index], hidden, atol=1e-5)
        if index < part.num_positions:
            rate = part.positions["acceptance_rate"][index]
            assert rate == pytest.approx(float(acceptance_rate(q, p)), abs=1e-5)
        of = {"drawn": index, "fed": int(part.before[index])}
        if len(before[of["fed"]]) + 1 != len(prefix):
            del of["fed"]  # the first token of a response: nothing was drafted before it
        for timing, scored in of.items():
            token = torch.tensor(int(part.token[scored]))
            state = alone(model(2), before[scored] if timing == "drawn" else [*before[scored], int(token)])[1]
            logits = alone(model(2), before[scored])[0]
            logit = logits.softmax(-1)[token].logit()
            scalars = torch.stack([logits.log_softmax(-1)[token], entropy(logits), logit])
            with torch.inference_mode():
                score = float(model_head(timing)(state, scalars, model(2).get_input_embeddings()(token)))
            assert scores[timing][index] == pytest.approx(score, abs=2e-4)
    prob = 1 / (1 + np.exp(-part.logit(ScoreHead("perfect", "drawn"))))
    assert prob == pytest.approx(part.signal("acceptance_prob"), abs=1e-6)


def test_branches_start_with_a_token_that_is_rejected_and_end_where_no_round_can_continue(warm):
    positions = np.concatenate([np.arange(len(row.response_ids)) for row in warm.rows])
    limits = np.concatenate([np.full(len(row.response_ids), row.limit) for row in warm.rows])
    for at in warm.is_rejected.nonzero()[0]:
        length, start = warm.branch_lengths[at], warm.first_drawn[at]
        room = min(small_pair.LENGTH, limits[at] - 1 - positions[at])
        tokens = warm.token[start : start + length]
        assert length == room or tokens[-1] == small_pair.EOS
        assert small_pair.EOS not in tokens[:-1].tolist()
        assert length == 0 or tokens[0] != warm.token[at]


def test_outcomes_and_rejected_draws_have_the_coupling_law():
    prompt, response = PROMPTS[0], [4, 2]
    q, p = (SHARP.probs(alone(which, prompt)[0]) for which in (model(2), model(1, 2)))
    grid = (torch.arange(NUM, dtype=torch.float64) + 0.5) / NUM
    chance = torch.rand(2, 1 + small_pair.LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn, accepted = torch.zeros(VOCAB, dtype=torch.float64), 0

    def recorded(limit: int) -> Trace:
        row = TraceRow("a", "", tuple(prompt), tuple(response), limit)
        return small_pair.recorder(SHARP, 1).record(row, chance)

    for uniform in grid.tolist():
        chance[0, 0] = uniform
        accepted += not recorded(2).is_rejected[0]
    chance[0, 0] = 1 - 1e-9
    for uniform in grid.tolist():
        chance[0, 1] = uniform
        drawn[int(recorded(small_pair.LIMIT).token[2])] += 1 / NUM
    assert accepted / NUM == pytest.approx(min(1.0, float(q[4] / p[4])), abs=2 / NUM)
    assert torch.allclose(drawn, residual_probs(q=p, p=q).double(), atol=2 / NUM)


def test_a_likeliest_token_is_accepted_where_the_response_has_it_with_the_targets_probability():
    trace = traced("likeliest", SHARP)
    models = [CachedModel(model(*sizes), vocab_size=VOCAB) for sizes in ((2,), (1, 2))]
    for row in range(6):
        part = trace.select([row])
        prompt, response = list(part.rows[0].prompt_ids), torch.tensor(part.rows[0].response_ids)
        for each in models:
            each.reset()
        likeliest, p = (each.feed(prompt + response[:-1].tolist(), len(response)) for each in models)
        likeliest, p = likeliest.argmax(-1), SHARP.probs(p)
        assert part.is_rejected.tolist() == (likeliest != response).tolist()
        at = part.branch_lengths.nonzero()[0]
        assert part.token[part.first_drawn[at]].tolist() == likeliest[torch.from_numpy(at)].tolist()
        accepted = (~part.is_rejected).nonzero()[0]
        expected = p[torch.from_numpy(accepted), response[torch.from_numpy(accepted)]].numpy()
        assert part.signal("acceptance_prob")[accepted] == pytest.approx(expected, rel=1e-4)


def expected_draft(
    kind: str, response: list[int], start: int, chance: torch.Tensor
) -> tuple[list[int], int, list[dict[str, float]]]:
    """(tokens, number that pass, signals of each) of the round from `start`, drafted token by token with the target."""
    tapped, drafting = beside(target_of(kind), draft(kind))
    tapped.feed([*PROMPT, *response[:start]][:-1])
    tokens, rejected, steps = [], None, []
    for depth in range(min(LENGTH, LIMIT - 1 - start)):
        committed = [*PROMPT, *response[:start]]
        logits = drafting.feed([*committed, *tokens][len(drafting) :])
        q = WARM.probs(logits)
        p = WARM.probs(target_of(kind)(torch.tensor([[*committed, *tokens]]), use_cache=False).logits[:, -1])
        position = start + depth
        if rejected is None:
            token = torch.tensor(response[position : position + 1])
            if not chance[position, 0] < acceptance_prob(token, q=p, p=q):
                token, rejected = draw(residual_probs(q=p, p=q), chance[position, 1:2]), depth
        else:
            token = draw(q, chance[start + rejected, 1 + depth - rejected].view(1))
        tokens.append(int(token))
        log_prob, prob = logits.log_softmax(-1)[0, token], acceptance_prob(token, q, p)
        numbers = {"entropy": float(entropy(logits)), "log_token_prob": float(log_prob), "acceptance_prob": float(prob)}
        steps.append(numbers | {"hidden": drafting.hidden[0]})
        if tokens[-1] == EOS:
            break
    return tokens, len(tokens) if rejected is None else rejected, steps


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS, *MTP])
def test_every_draft_of_a_feature_drafts_trace_is_that_of_a_round_by_itself(kind):
    response = next(one.response_ids for one in responses(20) if len(one.response_ids) > 6)
    chance = uniforms(5, len(response), forms.recorder(kind).num_uniforms)
    trace = forms.recorder(kind).record(TraceRow("a", "", tuple(PROMPT), tuple(response), LIMIT), chance)
    ends = len(response) + trace.branch_lengths.cumsum()
    assert trace.branch_lengths[0] == 0
    for start in range(1, len(response)):
        at = slice(int(ends[start - 1]), int(ends[start]))
        tokens, passing, steps = expected_draft(kind, response, start, chance)
        assert trace.token[at].tolist() == tokens
        assert trace.num_passing[start] == passing
        for name in ("entropy", "log_token_prob", "acceptance_prob"):
            assert trace.signal(name)[at].tolist() == pytest.approx([step[name] for step in steps], abs=1e-6)
        for hidden, step in zip(trace.inputs().hidden[at], steps, strict=True):
            assert torch.allclose(hidden, step["hidden"], atol=1e-6)


@pytest.mark.parametrize("kind", ["dflash", "glide"])
def test_a_policy_that_reads_a_confidence_is_refused_on_a_draft_without_one(kind):
    with pytest.raises(ValueError, match="has no confidence head"):
        replay_settings(traced(kind, num=5), DSparkConfidence())


def test_what_no_draft_can_draw_is_not_among_the_first_drawn_and_leaves_plots_finite():
    """A response's token beyond a reduced vocabulary has log q = -inf, and a head's score of it is no number."""
    trace = traced("reduced", num=40)
    assert np.isneginf(trace.signal("log_token_prob")[: trace.num_positions]).any()
    assert np.isfinite(trace.signal("log_token_prob")[trace.first_drawn[trace.is_drafted]]).all()
    np.testing.assert_array_equal(trace.is_drafted, trace.branch_lengths > 0)
    heads = {timing: feature_head(timing) for timing in ("drawn", "fed")}
    assert reliability_plot(trace, heads).svg.startswith("<svg")
    bins = bins_of(trace, heads["drawn"])
    drawn, is_accepted = trace.first_drawn[trace.is_drafted], trace.is_first_accepted[trace.is_drafted]
    predicted = expit(heads["drawn"].calibrated_logit(trace.logit(heads["drawn"]).astype(float)[drawn]))
    for number in range(15):
        is_here = (predicted >= number / 15) & (predicted < (number + 1 if number < 14 else 16) / 15)
        assert bins["count"][number] == (is_here.sum() if is_here.sum() >= 5 else 0)
        if bins["count"][number]:
            assert bins["true"][number] == pytest.approx(is_accepted[is_here].mean())
            assert bins["predicted"][number] == pytest.approx(predicted[is_here].mean())
    assert bins["count"].sum() > 20


def written(trace: Trace, directory: Path, num_shards: int = 2) -> Trace:
    manifest = {"sampling": trace.sampling.as_dict(), "max_draft_length": trace.max_draft_length, "eos_ids": [EOS]}
    if trace.draft_sampling is not None:
        manifest["draft_sampling"] = trace.draft_sampling.as_dict()
    (directory / "manifest.json").write_text(json.dumps(manifest))
    keys = [ShardKey("made", "dev", index) for index in range(num_shards)]
    for key, rows in zip(keys, np.array_split(np.arange(len(trace.rows)), num_shards), strict=True):
        write_trace(directory, key, trace.select(rows.tolist()), [])
    return read_trace(directory, keys)


@pytest.mark.parametrize(("kind", "sampling"), [("model", SHARP), ("likeliest", SHARP), ("eagle", WARM), ("rnn", WARM)])
def test_a_trace_is_the_same_after_writing_and_reading(kind, sampling, tmp_path):
    trace = forms.unscored(traced(kind, sampling))
    trace.logit(model_head("fed") if kind in ("model", "likeliest") else feature_head("fed", draft(kind).hidden_size))
    back, expected = written(trace, tmp_path), join_traces([trace.select(range(len(trace.rows)))])
    for name in ("rows", "sampling", "draft_sampling", "max_draft_length", "block_size"):
        assert getattr(back, name) == getattr(expected, name), name
    assert any(name.startswith("score.") for name in back.drafts)
    for columns in ("drafts", "positions"):
        ours, theirs = getattr(back, columns), getattr(expected, columns)
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"is_eos"}:
            np.testing.assert_array_equal(ours[name], theirs[name], name)
    for ours, theirs in zip(back.inputs(), expected.inputs(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_policy_that_reads_no_hidden_state_loads_none(tmp_path, warm):
    """The file is gone once the trace is read: what the entropy needs is in memory, what a head needs is not."""
    back = written(warm, tmp_path)
    for path in (tmp_path / "made" / "signals").glob("*.safetensors"):
        path.unlink()
    for ours, theirs in ((back, warm), (back.select(range(5)), warm.select(range(5)))):
        counts = [replay_settings(each, Entropy(0.3)).counts.num_drafted for each in (ours, theirs)]
        assert np.array_equal(*counts)
        with pytest.raises(FileNotFoundError):
            ours.logit(model_head("drawn"))


def test_texts_that_cross_a_change_of_rotary_frequencies_are_refused_before_anything_is_recorded(tmp_path):
    models = longrope.model_of("phi3", noise=0.05), longrope.model_of("phi3")
    recorder = Recorder(*models, Sampling(), 40, frozenset(), 3)
    remedy = f"beyond {longrope.BOUND} .*lower decode.max_new_tokens or data.max_prompt_tokens"
    for num_prompt in (longrope.BOUND - 10, longrope.BOUND):
        exchange = Exchange("a", "", longrope.text_of(num_prompt), longrope.text_of(10), "length")
        with pytest.raises(ValueError, match=remedy):
            record_trace(recorder, [exchange], max_new_tokens=10)
    shutil.copytree("checkpoints/tiny/target", tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    config = json.loads(path.read_text())
    num = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
    factors = {"short_factor": [1.0] * num, "long_factor": [4.0] * num, "original_max_position_embeddings": 256}
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | factors}))
    settings = {"num_dev": 1, "num_test": 1, "max_new_tokens": 12, "max_draft_length": 3, "dir": tmp_path / "run"}
    flags = spelt({f"decode.{name}": value for name, value in settings.items()})
    flags += [f"--pair.target.path={tmp_path / 'target'}", f"--heads.dir={tmp_path}", "--data.max_prompt_tokens=242"]
    with pytest.raises(ValueError, match=r"max_draft_length is 257, and Llama.* beyond 256 .*one of the three"):
        trace_folder(Experiment(config_with(["--config", "configs/tiny.yaml", *flags]))).complete()
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_heads_are_scored_piece_by_piece_and_every_piece_is_read_once():
    torch.manual_seed(0)
    parts = [small_pair.trace(Sampling(temperature=0.6), seed=seed) for seed in (1, 2, 3)]
    reads = []
    living = weakref.WeakSet()

    def read_again(number: int, inputs: InputTensors) -> InputTensors:
        assert not living, "the piece before it was dropped"
        reads.append(number)
        hidden = inputs.hidden.clone()
        living.add(hidden)
        return inputs._replace(hidden=hidden)

    reading = []
    for number, part in enumerate(parts):
        piece = whole_piece(partial(read_again, number, part.inputs()), len(part.token))
        reading.append(replace(part, pieces=(piece,)))
    joined = join_traces(reading)
    scalars = (*STANDARD, "text_position")
    heads = [AcceptanceHead(16, 1, timing, scalars, True).eval() for timing in ("fed", "drawn")]
    joined.score(heads)
    assert reads == [0, 1, 2]
    rows = [len(joined.rows) - 1, 0, 0]
    for head in heads:
        for number, part in enumerate(parts):
            first = sum(len(other.rows) for other in parts[:number])
            alone = joined.select(range(first, first + len(part.rows)))
            assert np.allclose(alone.logit(head), part.logit(head), atol=1e-6)
        unscored = replace(joined, drafts={k: v for k, v in joined.drafts.items() if not k.startswith("score.")})
        assert np.allclose(unscored.select(rows).logit(head), joined.select(rows).logit(head), atol=1e-6)
