"""`flags --from`: what engines write is read, and the estimate finds the best number of drafted tokens."""

import json

import numpy as np
import pytest

from configs.command import run
from decode.policies import FixedLength
from decode.policies.batch import BatchCosts, Curve
from evaluation.__main__ import COMMANDS
from evaluation.flags.counters import read_counters, speeds, tokens_per_round
from evaluation.flags.times import Given
from evaluation.traces.replay import replay_rounds
from lm import Sampling
from tests.toys.small_pair import trace

STEPS = {"per_step_accepted": [2, 0, 1, 3], "per_step_drafted": [3, 3, 3, 3]}
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
"""
LLAMA = (
    "I spec: statistics draft-mtp: #calls(b,g,a) = 1 4 4, #mean acc len = 2.5, #acc rate/pos = (0.75, 0.5, 0.25), dur"
)
SGLANG = (
    "server_args=ServerArgs(speculative_num_steps=3)\nDecode batch, #running-req: 1, accept len: {}, accept rate: 0.6"
)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"choices": [], "metrics": {"speculative_decoding": STEPS}}),
        json.dumps({"metrics": {"speculative_decoding": {"acceptance_histogram": [1, 1, 1, 1]}}}) + "\n" + '{"no": 1}',
        METRICS,
        f"{LLAMA.replace('0.75', '0.9')}\n{LLAMA}",
        SGLANG.format(1 + 0.75 + 0.75**2 + 0.75**3),
    ],
    ids=["per step", "histogram", "metrics", "llama.cpp", "sglang"],
)
def test_counters_of_every_engine_are_read(text, tmp_path):
    (tmp_path / "counters").write_text(text)
    [survival] = read_counters(str(tmp_path / "counters"))
    expected = [0.75**k for k in (1, 2, 3)] if "server_args" in text else [0.75, 0.5, 0.25]
    assert survival.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("source", "problem"),
    [("0.5,0.6", "are not falling"), ("1.5", "are not falling"), ("no counters", "has no counters of speculation")],
)
def test_what_is_no_counter_is_refused(source, problem, tmp_path):
    if "no" in source:
        (tmp_path / "text").write_text(source)
        source = str(tmp_path / "text")
    with pytest.raises(ValueError, match=problem):
        read_counters(source)


def test_an_acceptance_that_depends_on_nothing_is_the_same_at_every_number():
    """Then both assumptions hold, and the sum is that of a geometric series."""
    estimate, plain = tokens_per_round(0.8 ** np.arange(1, 4), 8)
    exact = [(1 - 0.8 ** (k + 1)) / 0.2 for k in range(9)]
    assert estimate.tolist() == pytest.approx(exact, rel=1e-6)
    assert plain.tolist() == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)])
def test_counters_at_one_number_name_the_best_one(sampling):
    """Against a replay of every number on the same texts, at three ratios of times: within 2 %."""
    rounds = {k: replay_rounds(trace(sampling), FixedLength(k)) for k in range(1, 6)}
    tokens = np.array([1.0, *(one.emitted.mean() for one in rounds.values())])
    survival = np.array([(rounds[3].emitted > j).mean() for j in (1, 2, 3)])
    for ratio in (2, 5, 20):
        given = Given(BatchCosts(Curve.line(1.0), Curve.line(ratio)), "given")
        best = int(speeds([survival], given, 1)[0][:6].argmax())
        exact = tokens / (np.arange(6) + ratio)
        assert exact[best] >= 0.98 * exact.max()


def test_two_counters_bracket_and_a_block_is_one_forward():
    given = Given(BatchCosts(Curve.line(1.0), Curve.line(5.0, 0.5)), "given")
    counters = read_counters("0.844,0.599,0.385,0.271/0.766,0.545")
    assert [len(one) for one in counters] == [2, 4]
    estimate, low, high = speeds(counters, given, 1)
    assert ((low <= estimate) & (estimate <= high)).all()
    assert low[2] == pytest.approx((1 + 0.766 + 0.545) / (2 + 6), rel=1e-3)
    block, *_ = speeds(counters, given, 1, is_block=True)
    assert block[3] / estimate[3] == pytest.approx((3 + 6.5) / (1 + 6.5))


TIMES = ("--t_draft_ms", "1", "--t_target_ms", "1:6,5:7,9:9")


@pytest.mark.parametrize(
    ("engine", "line"),
    [("vllm", '"num_speculative_tokens": 3'), ("sglang", "--speculative-num-steps 3"), ("llama.cpp", "n-max 3")],
)
def test_the_command_prints_the_number_and_its_line(engine, line, capsys):
    batch = [] if engine == "llama.cpp" else ["--batch", "1,16"]
    argv = ["flags", "--config", "tiny", "--for", engine, "--from", "0.844,0.599,0.385,0.271", *TIMES, *batch, "--json"]
    run(COMMANDS, argv=argv)
    document = json.loads(capsys.readouterr().out)
    assert document["k"] == 3
    assert line in document["line"]
    assert [row["number"] for row in document["batches"]] == ([3, 1] if batch else [])
