"""`flags`: its setting is the fastest that decoding finds, from a trace or from an engine's counters."""

import json
import re
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from decode import SpeculativeDecoder
from decode.loop.counts import Counts
from decode.loop.drafter import ModelDrafter
from decode.policies import FixedLength
from decode.policies.batch import Curve
from decode.policies.registry import policy_of
from evaluation.batches.load import queue_of
from evaluation.costs.measure import Loop
from evaluation.flags import times as flag_times
from evaluation.flags.answer import DEFAULT, FIXED, FLAGS, NONE, Answer, answer_of, arm_of
from evaluation.flags.command import batch_line
from evaluation.flags.counters import read_counters, speeds, tokens_per_round
from evaluation.flags.engines import ENGINES, LLAMA_CPP, VLLM, ShortDrafts
from evaluation.flags.times import LENGTHS, fitted, given_times, timed_generations
from evaluation.gain import Splits
from evaluation.played import Played
from evaluation.sources.clock import Clocked
from evaluation.times import Times, curve_of
from evaluation.traces.replay import replay_rounds, replay_settings
from heads import AcceptanceHead
from lm import Sampling
from tests.cases import first_fast
from tests.evaluation.commands import printed, refusal
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.toys.small_pair import EOS, LENGTH, LIMIT, PROMPTS, VOCAB, model, trace
from tests.toys.times import flat_times, times_by_length

GREEDY = Sampling(temperature=0)
SEARCHED = {"n_max": (1, 2, 3, 5), "n_min": (0, 2), "p_min": (0.0, 0.2, 0.4, 0.6, 0.8)}
LLAMA = replace(LLAMA_CPP, values=lambda longest: SEARCHED)


@pytest.fixture(scope="module")
def traces():
    whole = trace(GREEDY)
    return {LLAMA.draftings[0]: Splits(whole.select(range(20)), whole.select(range(20, 40)))}


def answer_at(traces, t_draft_s=1.0, t_target_s=20.0) -> Answer:
    return answer_of(LLAMA, traces, flat_times(t_draft_s, t_target_s))


def decoded(drafter):
    settings = {"sampling": GREEDY, "max_draft_length": LENGTH, "eos_ids": frozenset({EOS})}
    decoder = SpeculativeDecoder(model(1, 2), drafter, **settings)
    return [decoder.generate(prompt, LIMIT) for prompt in PROMPTS[:20]]


def decoded_speed(policy: ShortDrafts, times: Times) -> float:
    """Tokens per second of the dev prompts, decoded; a round reads what it verifies once more with the draft."""
    counts = [one.counts for one in decoded(PointMassDrafter(model(2), policy, vocab_size=VOCAB))]
    names = ("num_emitted", "num_target", "num_draft_forwards")
    tokens, rounds, forwards = (sum(getattr(each, name) for each in counts) for name in names)
    return float(tokens / (times.t_draft_s * (forwards + rounds) + times.alone_s * rounds))


@pytest.mark.parametrize("every", first_fast([9, 1], 1))
def test_the_flags_are_the_fastest_of_decoding_every_setting(every, traces):
    answer = answer_at(traces, t_draft_s=0.2)
    settings = [dict(zip(SEARCHED, values, strict=True)) for values in product(*SEARCHED.values())][::every]
    settings.append(dict(answer.flags.setting))
    speeds = {tuple(one.values()): decoded_speed(ShortDrafts(**one), answer.alone) for one in settings}
    assert answer.flags.on_dev == pytest.approx(max(speeds.values()), rel=1e-9)
    assert speeds[tuple(answer.flags.setting.values())] == pytest.approx(max(speeds.values()), rel=1e-9)
    assert max(speeds.values()) > 1.01 * min(speeds.values())


@pytest.mark.parametrize(
    ("engine", "setting"),
    [
        ("llama.cpp", {"n_max": 5, "p_min": 0.4}),
        ("vllm", {"k": 4}),
        ("sglang", {"k": 2}),
        ("transformers", {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.3, "is_heuristic": True}),
    ],
)
def test_an_engine_pays_the_same_for_a_setting_replayed_and_decoded(engine, setting, traces):
    policy = policy_of(ENGINES[engine].rule, setting)
    every = decoded(ModelDrafter(model(2), policy, vocab_size=VOCAB))
    counts = {f.name: np.array([[getattr(one.counts, f.name) for one in every]]) for f in fields(Counts)}
    drafted = [[len(one.drafted) for one in made.rounds] for made in every]
    lengths = np.array([[np.bincount(lengths, minlength=LENGTH + 1) for lengths in drafted]])
    played = Played(Counts(**counts), lengths, np.arange(len(every)))
    answer = answer_of(ENGINES[engine], traces, times_by_length(1.0, (20.0, 21.0, 22.0)))
    replayed = replay_settings(next(iter(traces.values())).dev, policy)
    one, other = (answer.speculating.throughput(answer.engine.played(each, [setting])) for each in (played, replayed))
    assert np.allclose(one, other, rtol=1e-12, atol=0)


def test_gains_are_over_the_default_the_best_fixed_length_and_no_speculation_which_may_be_best(traces):
    choices = answer_at(traces).choices
    assert choices[NONE].tokens_per_s == pytest.approx(1 / 20)
    assert choices[FIXED].setting.keys() == {"k"}
    assert dict(choices[DEFAULT].setting) == {"n_max": 3, "n_min": 0, "p_min": 0.0}
    gain = choices[FLAGS].over(choices[DEFAULT])
    assert gain.low <= gain.value <= gain.high
    assert gain.value == pytest.approx(choices[FLAGS].tokens_per_s / choices[DEFAULT].tokens_per_s - 1)
    answer = answer_at(traces, t_draft_s=20.0)
    assert answer.short_of_hindsight == pytest.approx(0, abs=0.05)
    assert not answer.as_dict()["speculates"]
    assert answer.line == "llama-server -m TARGET.gguf"
    assert "do not speculate" in next(answer.sentences())
    assert answer.flags.over(answer.choices[NONE]).value == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_best_fixed_length_is_that_of_every_way_of_drafting_and_vllm_claims_no_gain_over_it(order):
    """vLLM's setting is a fixed length. Drawn drafts are accepted more often here than the likeliest tokens."""
    drawn = trace(Sampling(), draft_sampling=Sampling())
    likeliest = trace(Sampling(), draft_sampling=Sampling(temperature=0))
    ways = list(zip(VLLM.draftings, (likeliest, drawn), strict=True))
    traces = {}
    for way, whole in (ways[index] for index in order):
        traces[way] = Splits(whole.select(range(20)), whole.select(range(20, 40)))
    answer = answer_of(VLLM, traces, flat_times(1.0, 20.0))
    names = {answer.choices[name].competitor.name for name in (FLAGS, FIXED)}
    assert names == {VLLM.draftings[1].label}
    sentence = next(answer.sentences())
    assert re.search(r"predicted \+[\d.]+ % \([\d.]+, [\d.]+\) over no speculation\.$", sentence)
    few = {way: Splits(splits.dev, splits.test.select(range(8))) for way, splits in traces.items()}
    sentence = next(answer_of(VLLM, few, flat_times(1.0, 20.0)).sentences())
    assert "over no speculation. 8 test prompts are too few for an interval" in sentence


SMALL = ("--decode.num_dev", "3", "--decode.num_test", "2", "--decode.max_new_tokens", "24")
TIMES = ("--t_draft_ms", "1", "--t_target_ms", "1:6,5:7,9:9")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    AcceptanceHead(96, 0, "drawn").save_pretrained(directory / "heads" / "exported" / "plain")
    folders = ("--decode.dir", str(directory), "--heads.dir", str(directory / "heads"))
    return ["--config", "configs/tiny.yaml", *folders, *SMALL, "--decode.max_draft_length", "6"]


WRITTEN = {"llama.cpp": "--spec-draft-p-min", "vllm": '"num_speculative_tokens": ', "sglang": "--speculative-num-steps"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_the_command_prints_the_line_of_every_engine(engine, tiny, capsys):
    batch = ["--batch", "1,2"] if ENGINES[engine].has_batches else []
    lines, document = printed(capsys, "flags", *tiny, "--for", engine, *TIMES, *batch)
    assert WRITTEN.get(engine, "assistant_confidence_threshold=") in document["line"]
    assert document["line"] in "\n".join(lines)
    assert {choice["what"] for choice in document["choices"]} >= {NONE, FIXED, FLAGS, "our best head"}
    assert [row["size"] for row in document["batches"]] == ([1, 2] if batch else [])
    assert document["costs"]["target"] == {"numbers": [1, 5, 9], "seconds": [0.006, 0.007, 0.009]}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--for", "llama.cpp", "--batch", "4"], "leave it out for llama.cpp"),
        (["--for", "transformers", "--pair.sampling.temperature", "0.5", *TIMES], "to its draft twice"),
        (["--for", "lama.cpp"], "--for is lama.cpp, but it must be one of llama.cpp, vllm, sglang, transformers"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(flags, problem, tiny, capsys):
    assert problem in refusal(capsys, "flags", *tiny, *flags)


def test_vllm_drafts_its_full_number_in_every_round_and_once_more_for_each_text(traces):
    """Between the two seconds lies what drafts that end with their text would save."""
    [(drafting, splits)] = traces.items()
    dev = splits.dev
    rule, times = VLLM.competitor("k", 4, {"k": [4]}), flat_times(1.0, 20.0)
    engines = VLLM, replace(VLLM, drafts_whole=False)
    whole, ending = (times.throughput(arm_of(engine, rule, drafting, splits).dev) for engine in engines)
    rounds, num_texts = replay_settings(dev, FixedLength(4)).counts.num_target.sum(), 20
    assert whole.seconds.sum() == 20.0 * rounds + 4 * (rounds + num_texts)
    assert ending.seconds.sum() <= (20.0 + 4) * rounds
    [of_dev, _] = answer_of(VLLM, traces, times).in_batches([1], times.costs(""))[1]
    num_rounds = replay_settings(dev, FixedLength(4)).counts.num_target[0]
    requests = queue_of(len(dev.rows), 1)
    seconds = (24.0 * num_rounds + 4)[requests].sum()
    tokens = np.diff(dev.offsets)[requests].sum()
    assert of_dev[4] == pytest.approx(tokens / seconds), "a batch of one costs what one sequence costs"
    rows = [{"size": size, "number": number} for size, number in ((1, 5), (4, 3), (8, 3), (32, 0))]
    sizes = "[[1, 1, 5], [2, 8, 3], [9, 32, 0]]"
    line = f'"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": {sizes}'
    assert batch_line(VLLM, rows) == line


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
LLAMA_LOG = (
    "I spec: statistics draft-mtp: #calls(b,g,a) = 1 4 4, #mean acc len = 2.5, #acc rate/pos = (0.75, 0.5, 0.25), dur"
)
SGLANG = (
    "server_args=ServerArgs(speculative_num_steps=3)\nDecode batch, #running-req: 1, accept len: {}, accept rate: 0.6"
)


COUNTED = {
    "per step": json.dumps({"choices": [], "metrics": {"speculative_decoding": STEPS}}),
    "histogram": json.dumps({"metrics": [{"acceptance_histogram": [1, 1, 1, 1]}]}) + '\n{"no": 1}',
    "metrics": METRICS,
    "llama.cpp": f"{LLAMA_LOG.replace('0.75', '0.9')}\n{LLAMA_LOG}",
    "sglang": SGLANG.format(1 + 0.75 + 0.75**2 + 0.75**3),
}


def test_counters_of_every_engine_are_read_and_what_is_none_is_refused(tmp_path):
    (path := tmp_path / "counters").write_text("no counters")
    problems = {"0.5,0.6": "not falling", "1.5": "not falling", str(path): "has no counters"}
    problems["0.8,0.6/0.7,0.5"] = "2 counters are of 2 drafted tokens; give one counter for each number"
    for source, problem in problems.items():
        with pytest.raises(ValueError, match=problem):
            read_counters(source)
    for kind, text in COUNTED.items():
        path.write_text(text)
        [survival] = read_counters(str(path))
        expected = [0.75**k for k in (1, 2, 3)] if kind == "sglang" else [0.75, 0.5, 0.25]
        assert survival.tolist() == pytest.approx(expected, abs=1e-9), kind


def test_two_counters_bracket_a_block_is_one_forward_and_a_constant_acceptance_is_the_same_at_every_number():
    given = Times(Curve.line(1.0), Curve.line(5.0, 0.5))
    counters = read_counters("0.844,0.599,0.385,0.271/0.766,0.545")
    assert [len(one) for one in counters] == [2, 4]
    estimate, low, high = speeds(counters, given, 1)
    assert ((low <= estimate) & (estimate <= high)).all()
    assert low[2] == pytest.approx((1 + 0.766 + 0.545) / (2 + 6), rel=1e-3)
    block, *_ = speeds(counters, given, 1, is_block=True)
    assert block[3] / estimate[3] == pytest.approx((3 + 6.5) / (1 + 6.5))
    estimate, plain = tokens_per_round(0.8 ** np.arange(1, 4), 8)
    exact = [(1 - 0.8 ** (k + 1)) / 0.2 for k in range(9)]  # a geometric series
    assert estimate.tolist() == pytest.approx(exact, rel=1e-6)
    assert plain.tolist() == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)])
def test_counters_at_one_number_name_the_best_one(sampling):
    rounds = {k: replay_rounds(trace(sampling), FixedLength(k)) for k in range(1, 6)}
    tokens = np.array([1.0, *(one.emitted.mean() for one in rounds.values())])
    survival = np.array([(rounds[3].emitted > j).mean() for j in (1, 2, 3)])
    for ratio in (2, 5, 20):
        given = Times(Curve.line(1.0), Curve.line(ratio))
        best = int(speeds([survival], given, 1)[0][:6].argmax())
        exact = tokens / (np.arange(6) + ratio)
        assert exact[best] >= 0.98 * exact.max()


@pytest.mark.parametrize(
    ("engine", "line"),
    [("vllm", '"num_speculative_tokens": 3'), ("sglang", "--speculative-num-steps 3"), ("llama.cpp", "n-max 3")],
)
def test_the_command_prints_the_number_and_its_line(engine, line, capsys):
    batch = [] if engine == "llama.cpp" else ["--batch", "1,16"]
    argv = ["flags", "--config", "tiny", "--for", engine, "--from", "0.844,0.599,0.385,0.271", *TIMES, *batch]
    _, document = printed(capsys, *argv)
    assert document["k"] == 3
    assert line in document["line"]
    assert [row["number"] for row in document["batches"]] == ([3, 1] if batch else [])


LOG = """\
0.05.995.490 I slot print_timing: id  0 | task 7 | prompt eval time =      20.00 ms /    10 tokens (    2.00 ms per \
token,   500.00 tokens per second)
0.05.995.548 I slot print_timing: id  0 | task 7 |        eval time =     900.00 ms /   101 tokens (    9.00 ms per \
token,   111.11 tokens per second)
0.05.995.550 I slot print_timing: id  0 | task 7 | draft acceptance = 0.50000 (   60 accepted /   120 generated)
"""
STATISTICS = """\
0.05.995.669 I spec common_specu: statistics     draft-simple: #calls(b,g,a) =    1     40     40, #gen drafts =     \
40, #acc drafts =    30, #gen tokens =    120, #acc tokens =    60, #mean acc len = 2.50, #acc rate/pos = (0.750, \
0.500, 0.250), dur(b,g,a) = 0.001, 240.000, 0.002 ms
"""
"""Lines as a server of 0.5.0-dev prints them."""


def test_numbers_pairs_and_logs_of_llama_cpp_give_both_times(tmp_path):
    """240 ms of 120 drafted tokens are 2 ms each; (900 - 240) / 40 rounds less the draft's second reading is 14.5 for
    4 tokens. Without a draft 900 ms of 100 forwards are 9 each.
    """
    assert curve_of("t_target_ms", 30)([1, 5, 40]).tolist() == [0.03, 0.03, 0.03]
    line = curve_of("t_target_ms", "1:30,5:34,9:50")([1, 3, 5, 7, 11])
    assert line.tolist() == pytest.approx([0.03, 0.032, 0.034, 0.042, 0.058])
    curves = given_times(None, None, logs_in(tmp_path, LOG + STATISTICS, LOG))
    assert float(curves.draft(1)) == pytest.approx(0.002)
    assert curves.target([1, 4, 7]).tolist() == pytest.approx([0.009, 0.0145, 0.02])


def logs_in(directory, *texts: str) -> str:
    paths = [directory / f"{number}.log" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return ",".join(map(str, paths))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((4, None, None), "go together"),
        ((4, 30, "server.log"), "give one of them"),
        ((4, "5:30,1:20", None), "t_target_ms is 5:30,1:20"),
        ((4, -3, None), "t_target_ms is -3"),
        ((4, "fast", None), "t_target_ms is fast"),
        (["nothing", LOG], "no `eval time`.*--t_draft_ms"),
        ([LOG], "with a draft is missing.*--t_draft_ms"),
        ([LOG + STATISTICS], "without a draft is missing.*--t_draft_ms"),
        ([LOG, (LOG + STATISTICS).replace("900.00", "250.00")], "leaves -.*--t_draft_ms"),
    ],
)
def test_flags_and_logs_that_give_no_times_are_refused(flags, problem, tmp_path):
    times = (None, None, logs_in(tmp_path, *flags)) if isinstance(flags, list) else flags
    with pytest.raises(ValueError, match=problem):
        given_times(*times)


def test_the_fit_finds_the_times_that_runs_were_made_of_whatever_a_few_outliers_are():
    generator = np.random.default_rng(0)
    runs = []
    for number in range(120):
        drafts, rounds, plain = 0, 0, 64
        if number % 6:
            drafts, rounds, plain = int(generator.integers(20, 90)), int(generator.integers(8, 40)), 0
        seconds = 0.02 + 0.003 * drafts + 0.011 * rounds + 0.008 * plain + 1e-4 * generator.standard_normal()
        counts = Counts(num_draft_forwards=drafts, num_target=rounds + plain)
        whole_s = seconds * (3.0 if number % 17 == 0 else 1.0)
        runs.append(Clocked(counts=counts, whole_s=whole_s, first_token_s=0.0))
    times = fitted(runs)
    assert times.t_draft_s == pytest.approx(0.003, rel=0.02)
    assert times.target_s(np.arange(4)).tolist() == pytest.approx([0.008, 0.011, 0.011, 0.011], rel=0.02)
    assert 0 < times.errors.drafting < 0.05
    assert all(0 < error < 0.05 for error in times.errors.verifying)


def test_generations_of_transformers_take_turns_and_their_forwards_are_counted(pair, monkeypatch):
    monkeypatch.setattr(flag_times, "BUDGET_S", 0.0)
    loop = Loop(pair=pair, sampling=Sampling(), max_draft_length=4, prompts=PROMPTS[:2], max_new_tokens=6)
    runs = timed_generations(loop)
    num_turns = len(runs) // len(LENGTHS)
    assert num_turns == flag_times.FEWEST_TURNS
    alone = [run.counts for run in runs[:num_turns]]
    assert {(counts.num_draft_forwards, counts.num_target, counts.num_emitted) for counts in alone} == {(0, 6, 6)}
    for counts in (run.counts for run in runs[num_turns : 2 * num_turns]):  # drafts of one token
        assert 2 <= counts.num_target <= 6
        assert 2 <= counts.num_draft_forwards <= counts.num_target
