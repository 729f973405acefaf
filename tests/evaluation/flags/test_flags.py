"""`flags`: the setting it prints is the fastest that decoding finds, and refusals are one line."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from configs.command import run
from decode import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies import FixedLength
from decode.policies.registry import make_policy
from evaluation.__main__ import COMMANDS
from evaluation.flags.command import DEFAULT, FIXED, FLAGS, NONE, Answer, batch_line
from evaluation.flags.engines import ENGINES, LLAMA_CPP, VLLM, ShortDrafts
from evaluation.gain import Splits
from evaluation.played import Played
from evaluation.times import Times
from evaluation.traces.replay import replay_settings
from heads import AcceptanceHead
from lm import Sampling
from tests.cases import first_fast
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.toys.small_pair import EOS, LENGTH, LIMIT, PROMPTS, VOCAB, model, trace

GREEDY = Sampling(temperature=0)
SEARCHED = {"n_max": (1, 2, 3, 5), "n_min": (0, 2), "p_min": (0.0, 0.2, 0.4, 0.6, 0.8)}
LLAMA = replace(LLAMA_CPP, values=lambda longest: SEARCHED)


@pytest.fixture(scope="module")
def traces():
    whole = trace(GREEDY)
    return {LLAMA.draftings[0]: Splits(whole.select(range(20)), whole.select(range(20, 40)))}


def answer_at(traces, t_draft_s=1.0, t_target_s=20.0) -> Answer:
    return Answer(LLAMA, traces, Times.constant(t_draft_s, t_target_s))


def decoded(drafter):
    """Generations of the dev prompts."""
    settings = {"sampling": GREEDY, "max_draft_length": LENGTH, "eos_ids": frozenset({EOS})}
    decoder = SpeculativeDecoder(model(1, 2), drafter, **settings)
    return [decoder.generate(prompt, LIMIT) for prompt in PROMPTS[:20]]


def decoded_speed(policy: ShortDrafts, times: Times) -> float:
    """Tokens per second of the dev prompts, decoded; a round reads what it verifies once more with the draft."""
    counts = [one.counts for one in decoded(PointMassDrafter(model(2), policy, vocab_size=VOCAB))]
    tokens, rounds, forwards = (
        sum(getattr(each, name) for each in counts) for name in ("num_emitted", "num_target", "num_draft_forwards")
    )
    return float(tokens / (times.t_draft_s * (forwards + rounds) + times.t_target_s[0] * rounds))


@pytest.mark.parametrize("every", first_fast([9, 1], 1))
def test_the_flags_are_the_fastest_of_decoding_every_setting(every, traces):
    """Or of decoding every ninth and the chosen one."""
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
    policy = make_policy(ENGINES[engine].rule, **setting)
    played = Played.of(decoded(ModelDrafter(model(2), policy, vocab_size=VOCAB)), LENGTH)
    answer = Answer(ENGINES[engine], traces, Times(1.0, (20.0, 21.0, 22.0)))
    replayed = replay_settings(next(iter(traces.values())).dev, policy)
    one, other = (answer.speculating.throughput(answer.engine.played(each, [setting])) for each in (played, replayed))
    assert np.allclose(one, other, rtol=1e-12, atol=0)


def test_where_a_draft_costs_what_it_saves_the_answer_is_not_to_speculate(traces):
    answer = answer_at(traces, t_draft_s=20.0)
    assert answer.short_of_hindsight == pytest.approx(0, abs=0.05)
    assert not answer.as_dict()["speculates"]
    assert answer.line == "llama-server -m TARGET.gguf"
    assert "do not speculate" in next(answer.sentences())
    assert answer.flags.over(answer.choices[NONE]).value == 0


def test_gains_are_over_the_default_the_best_fixed_length_and_no_speculation(traces):
    choices = answer_at(traces).choices
    assert choices[NONE].tokens_per_s == pytest.approx(1 / 20)
    assert choices[FIXED].setting.keys() == {"k"}
    assert dict(choices[DEFAULT].setting) == {"n_max": 3, "n_min": 0, "p_min": 0.0}
    gain = choices[FLAGS].over(choices[DEFAULT])
    assert gain.low <= gain.value <= gain.high
    assert gain.value == pytest.approx(choices[FLAGS].tokens_per_s / choices[DEFAULT].tokens_per_s - 1)


def test_vllm_has_all_sizes_of_batches_in_one_setting():
    rows = [{"size": size, "number": number} for size, number in ((1, 5), (4, 3), (8, 3), (32, 0))]
    assert batch_line(VLLM, rows) == (
        '"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 8, 3], [9, 32, 0]]'
    )


SMALL = ("--decode.num_dev", "3", "--decode.num_test", "2", "--decode.max_new_tokens", "24")
TIMES = ("--t_draft_ms", "1", "--t_target_ms", "1:6,5:7,9:9")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Options of a run on the embedded pair."""
    directory = tmp_path_factory.mktemp("run")
    AcceptanceHead(96, 0, "drawn").save_pretrained(directory / "heads" / "exported" / "plain")
    folders = ("--decode.dir", str(directory), "--heads.dir", str(directory / "heads"))
    return ["--config", "configs/tiny.yaml", *folders, *SMALL, "--decode.max_draft_length", "6"]


@pytest.mark.parametrize(
    ("engine", "written"),
    [
        ("llama.cpp", "--spec-draft-p-min"),
        ("vllm", '"num_speculative_tokens": '),
        ("sglang", "--speculative-num-steps"),
        ("transformers", "assistant_confidence_threshold="),
    ],
)
@pytest.mark.slow
def test_the_command_prints_the_line_of_every_engine(engine, written, tiny, capsys):
    batch = ["--batch", "1,2"] if ENGINES[engine].has_batches else []
    run(COMMANDS, argv=["flags", *tiny, "--for", engine, *TIMES, *batch, "--json"])
    out, shown = capsys.readouterr()
    document = json.loads(out)
    assert written in document["line"]
    assert document["line"] in shown
    assert {choice["what"] for choice in document["choices"]} >= {NONE, FIXED, FLAGS, "our best head"}
    assert [row["size"] for row in document["batches"]] == ([1, 2] if batch else [])
    assert document["costs"]["t_target_s"][:5] == pytest.approx([0.006, 0.00625, 0.0065, 0.00675, 0.007])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--for", "llama.cpp", "--batch", "4"], "leave it out for llama.cpp"),
        (["--for", "transformers", "--pair.sampling.temperature", "0.5", *TIMES], "to its draft twice"),
        (["--for", "vllm", "--t_draft_ms", "1"], "go together"),
        (["--for", "lama.cpp"], "--for is lama.cpp, but it must be one of llama.cpp, vllm, sglang, transformers"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(flags, problem, tiny, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(COMMANDS, argv=["flags", *tiny, *flags])
    assert problem in capsys.readouterr().err


def test_the_second_reading_of_llama_cpps_draft_is_paid_in_each_round(traces):
    answer = Answer(LLAMA, traces, Times(1.0, (4.0, 5.0)))
    assert answer.alone.t_target_s == (4.0, 5.0)
    assert answer.speculating.t_target_s == (5.0, 6.0)
    assert Answer(VLLM, traces, Times(1.0, (4.0,))).speculating.t_target_s == (4.0,)


def test_vllm_drafts_its_full_number_in_every_round_and_once_more_for_each_text(traces):
    """Between the two seconds lies what drafts that end with their text would save."""
    [(drafting, (dev, _))] = traces.items()
    rule = VLLM.competitor("k", 4, {"k": [4]})
    engines = VLLM, replace(VLLM, drafts_whole=False)
    times = Times.constant(1.0, 20.0)
    whole, ending = (times.throughput(Answer(engine, traces, times).arm(rule, drafting).dev) for engine in engines)
    rounds, num_texts = replay_settings(dev, FixedLength(4)).counts.num_target.sum(), 20
    assert whole.seconds.sum() == 20.0 * rounds + 4 * (rounds + num_texts)
    assert ending.seconds.sum() <= (20.0 + 4) * rounds
