"""A recorded trace holds what the models say, and replays to what decoding does (law 4.10)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_gen.store.manifest import settle
from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import (
    AdaEDL,
    CumulativeTokenProb,
    Entropy,
    FixedLength,
    HeadPolicy,
    Heuristic,
    MaxProb,
    SelfVerify,
    TokenProb,
)
from evaluation.traces.bounds import ScoreHead
from evaluation.traces.disk import Place, read_trace, write_trace
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace, join_traces
from heads import AcceptanceHead
from lm import CachedModel, Sampling, acceptance_prob, acceptance_rate, entropy, residual_probs
from tests.toys.small_pair import EOS, LENGTH, LIMIT, PROMPTS, VOCAB, model, recorder, trace

WARM = Sampling(temperature=0.8, top_k=8)
NUM = 150
COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted", "num_draft_forwards")


def head(timing: str) -> AcceptanceHead:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = AcceptanceHead(16, 1, timing, True, True)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


POLICIES = {
    "fixed_length": FixedLength(3),
    "heuristic": Heuristic(2),
    "token_prob": TokenProb(0.5),
    "cumulative_token_prob": CumulativeTokenProb(0.3),
    "max_prob": MaxProb(0.5),
    "entropy": Entropy(0.3),
    "self_verify": SelfVerify(),
    "ada_edl": AdaEDL(0.4),
    "fed_head": HeadPolicy(head("fed"), 0.5),
    "drawn_head": HeadPolicy(head("drawn"), 0.5),
    "both_heads": HeadPolicy(head("fed"), 0.5, also=head("drawn")),
}


def prefixes(traced: Trace) -> list[list[int]]:
    """What stood before each drawn token, in flat order."""
    found: list[list[int]] = []
    for row in traced.rows:
        found += [[*row.prompt_ids, *row.response_ids[:position]] for position in range(len(row.response_ids))]
    for at, length in zip(traced.is_rejected.nonzero()[0], traced.branch_lengths, strict=True):
        tokens = traced.token[traced.branch[at] : traced.branch[at] + length].tolist()
        found += [[*found[at], *tokens[:depth]] for depth in range(length)]
    return found


def alone(which: torch.nn.Module, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and hidden state of one model over one sequence, with nothing batched or cached."""
    cached = CachedModel(which, with_hidden=True)
    logits = cached.forward(ids)[-1]
    return logits, cached.hidden[-1]


@pytest.fixture(scope="module")
def warm() -> Trace:
    return trace(WARM)


@pytest.fixture(scope="module")
def cold() -> Trace:
    return trace(Sampling(temperature=0))


def test_every_signal_of_path_and_branches_is_that_of_a_forward_over_its_own_prefix(warm):
    part = warm.select(range(6))
    for index, prefix in enumerate(prefixes(part)):
        token = torch.tensor([int(part.token[index])])
        logits, hidden = alone(model(2), prefix)
        p_logits, _ = alone(model(1, 2), prefix)
        q, p = WARM.probs(logits)[None], WARM.probs(p_logits)[None]
        expected = {
            "entropy": entropy(logits),
            "max_prob": logits.softmax(-1).max(),
            "log_token_prob": logits.log_softmax(-1)[token],
            "acceptance_prob": acceptance_prob(token, q, p),
        }
        for name, value in expected.items():
            assert part.signals[name][index] == pytest.approx(float(value), abs=2e-5), (name, index)
        assert torch.allclose(part.inputs.tensors.hidden[index], hidden, atol=1e-5)
        if index < part.num_positions:
            assert part.acceptance_rate[index] == pytest.approx(float(acceptance_rate(q, p)), abs=1e-5)


def test_branches_start_with_a_token_that_is_rejected_and_end_where_no_round_can_go_on(warm):
    positions = np.concatenate([np.arange(len(row.response_ids)) for row in warm.rows])
    limits = np.concatenate([np.full(len(row.response_ids), row.limit) for row in warm.rows])
    for at, length in zip(warm.is_rejected.nonzero()[0], warm.branch_lengths, strict=True):
        room = min(LENGTH, limits[at] - 1 - positions[at])
        tokens = warm.token[warm.branch[at] : warm.branch[at] + length]
        assert length == room or tokens[-1] == EOS
        assert EOS not in tokens[:-1].tolist()
        assert length == 0 or tokens[0] != warm.token[at]


def test_outcomes_and_rejected_draws_have_the_coupling_law():
    prompt, response = PROMPTS[0], [4, 2]
    q, p = (WARM.probs(alone(which, prompt)[0]) for which in (model(2), model(1, 2)))
    grid = (torch.arange(NUM, dtype=torch.float64) + 0.5) / NUM
    chance = torch.rand(2, 1 + LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn, accepted = torch.zeros(VOCAB, dtype=torch.float64), 0
    for uniform in grid.tolist():
        chance[0, 0] = uniform
        accepted += not recorder(WARM, 1).record(prompt, response, 2, chance).is_rejected[0]
    chance[0, 0] = 1 - 1e-9
    for uniform in grid.tolist():
        chance[0, 1] = uniform
        drawn[int(recorder(WARM, 1).record(prompt, response, LIMIT, chance).token[2])] += 1 / NUM
    assert accepted / NUM == pytest.approx(min(1.0, float(q[4] / p[4])), abs=2 / NUM)
    assert torch.allclose(drawn, residual_probs(q=p, p=q).double(), atol=2 / NUM)


@pytest.mark.parametrize("name", POLICIES)
def test_at_temperature_0_replay_agrees_with_decoding_prompt_by_prompt(name, cold):
    policy, greedy = POLICIES[name], Sampling(temperature=0)
    counts = replay_settings(cold, policy).counts
    decoder = SpeculativeDecoder(
        model(1, 2), ModelDrafter(model(2), policy), sampling=greedy, max_draft_length=LENGTH, eos_ids=frozenset({EOS})
    )
    for row, prompt in enumerate(PROMPTS[:20]):
        real = decoder.generate(prompt, LIMIT).counts
        assert tuple(int(getattr(counts, name)[0, row]) for name in COUNTED) == tuple(
            getattr(real, name) for name in COUNTED
        )


@pytest.mark.slow
def test_the_counts_of_replay_and_of_decoding_have_one_mean():
    """22 z-scores; all below 4.5 but with probability 22 * 6.8e-6 = 1.5e-4 if the means are equal."""
    traced = trace(WARM, copies=8, seed=3)
    generator = torch.Generator().manual_seed(11)
    for name, policy in POLICIES.items():
        counts = replay_settings(traced, policy).counts
        decoder = SpeculativeDecoder(
            model(1, 2),
            ModelDrafter(model(2), policy),
            sampling=WARM,
            max_draft_length=LENGTH,
            eos_ids=frozenset({EOS}),
        )
        real = [decoder.generate(prompt, LIMIT, generator=generator).counts for prompt in PROMPTS[:8]]
        for what in ("num_drafted", "num_target"):
            replayed = getattr(counts, what)[0].reshape(-1, len(PROMPTS))[:, :8].astype(float)
            # prompt by prompt: one decoding against the mean and spread of the copies in the trace
            decoded = np.array([getattr(each, what) for each in real], dtype=float)
            spread = replayed.var(axis=0, ddof=1)
            z = (decoded - replayed.mean(axis=0)).sum() / np.sqrt((spread * (1 + 1 / len(replayed))).sum())
            assert abs(z) < 4.5, (name, what, z)


def test_heads_score_a_trace_as_they_score_a_draft(warm):
    part = warm.select(range(3))
    found = prefixes(part)
    for timing in ("fed", "drawn"):
        scores = part.logit(head(timing))
        for index in range(len(found)):
            of = index if timing == "drawn" else int(part.before[index])
            if timing == "fed" and len(found[of]) + 1 != len(found[index]):
                continue  # the first token of a response: nothing was drafted before it
            token = torch.tensor(int(part.token[of]))
            state = alone(model(2), found[of] if timing == "drawn" else [*found[of], int(token)])[1]
            logits = alone(model(2), found[of])[0]
            scalars = torch.stack([logits.log_softmax(-1)[token], entropy(logits)])
            with torch.inference_mode():
                expected = float(head(timing)(state, scalars, model(2).get_input_embeddings()(token)))
            assert scores[index] == pytest.approx(expected, abs=2e-4)


def test_a_perfect_head_scores_the_true_acceptance(warm):
    prob = 1 / (1 + np.exp(-warm.logit(ScoreHead("perfect", "drawn"))))
    assert prob == pytest.approx(warm.signals["acceptance_prob"], abs=1e-6)


def test_a_trace_is_the_same_after_writing_and_reading(tmp_path, warm):
    warm.logit(head("fed"))
    settle(tmp_path, {"sampling": WARM.as_dict(), "max_draft_length": LENGTH, "eos_ids": [EOS]})
    parts = [warm.select(range(25)), warm.select(range(25, 40))]
    for index, part in enumerate(parts):
        write_trace(tmp_path, Place("made", "dev", index), trace=part, problems=[])
    back, expected = read_trace(tmp_path, "made", "dev", 2), join_traces(parts)
    assert back.rows == warm.rows
    assert head("fed").fingerprint() in back.scores
    for name in POLICIES:
        ours, theirs = (replay_settings(each, POLICIES[name]).counts for each in (back, expected))
        assert np.array_equal(ours.num_drafted, theirs.num_drafted)


def test_a_policy_that_reads_no_hidden_state_loads_none(tmp_path, warm):
    """The file is gone once the trace is read: what the entropy needs is there, what a head needs is not."""
    settle(tmp_path, {"sampling": WARM.as_dict(), "max_draft_length": LENGTH, "eos_ids": [EOS]})
    for index, rows in enumerate((range(25), range(25, 40))):
        write_trace(tmp_path, Place("made", "dev", index), trace=warm.select(rows), problems=[])
    back, kept = read_trace(tmp_path, "made", "dev", 2), read_trace(tmp_path, "made", "dev", 2)
    unscored = replace(warm, scores={})
    assert np.array_equal(kept.logit(head("drawn")), unscored.logit(head("drawn")))
    for path in (tmp_path / "made" / "signals").glob("*.safetensors"):
        path.unlink()
    assert np.array_equal(*(replay_settings(each, Entropy(0.3)).counts.num_drafted for each in (back, warm)))
    part = back.select(range(5))
    assert np.array_equal(
        *(replay_settings(each, Entropy(0.3)).counts.num_drafted for each in (part, warm.select(range(5))))
    )
    for each in (back, part):
        with pytest.raises(FileNotFoundError):
            each.logit(head("drawn"))


def test_a_corrupted_shard_is_refused_by_name(tmp_path, warm):
    settle(tmp_path, {"sampling": WARM.as_dict(), "max_draft_length": LENGTH, "eos_ids": [EOS]})
    write_trace(tmp_path, Place("made", "dev", 0), trace=warm, problems=[])
    path = tmp_path / "made" / "signals" / "dev-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="sha256"):
        read_trace(tmp_path, "made", "dev", 1)


def test_another_manifest_is_refused_with_the_key_that_differs(tmp_path):
    settle(tmp_path, {"seed": 0})
    with pytest.raises(ValueError, match="differs in seed: 0 there, 1 in this run"):
        settle(tmp_path, {"seed": 1})
