"""On the clock every family plays the same prompts; what it took is compared with what was predicted, part by part."""

from dataclasses import replace

import numpy as np
import pytest

from decode.policies import AdaEDL, CumulativeTokenProb, FixedLength, Policy
from evaluation.clock import about_clock, check_clock, clock_table, report_of
from evaluation.competitor import Competitor
from evaluation.contest import Arm, Result, result_of
from evaluation.families import family
from evaluation.gain import Throughput, gain_over
from evaluation.played import Played
from evaluation.sources.primed import PrimedLoop, PrimedModel, clock, clocked_rows
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from lm import Pair, Sampling
from tests.evaluation.traces import forms
from tests.toys.random_drafts import draft, target_of
from tests.toys.small_pair import EOS, LENGTH, PROMPTS, VOCAB, Words, model, trace
from tests.toys.times import flat_times

WARM = Sampling(temperature=0.8)
POLICIES: dict[str, Policy] = {
    "fixed_length": FixedLength(2),
    "cumulative_token_prob": CumulativeTokenProb(0.3),
    "ada_edl": AdaEDL(0.4),
}
COST = flat_times(0.001, 0.005)


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return trace(WARM).select(range(5))


def runner_of(name: str, policy: Policy, replayed: Played) -> Result:
    return result_of(Arm(Competitor(name, name, policy, ({},)), replayed, replayed), 0, COST)


def runners_on(recorded: Trace, policies: dict[str, Policy] = POLICIES) -> list[Result]:
    return [runner_of(name, policy, replay_settings(recorded, policy)) for name, policy in policies.items()]


@pytest.fixture
def loop(pair) -> PrimedLoop:
    return PrimedLoop(pair=pair, sampling=WARM, max_draft_length=LENGTH, ends_at_eos=True)


def test_every_prompt_is_played_as_it_was_replayed_and_timed_in_each_turn_or_left_out(recorded, loop):
    runners = runners_on(recorded)
    on_clock = clock(loop, runners, recorded, range(5), repeats=2, name="made")
    for played, runner in zip(on_clock, runners, strict=True):
        assert np.array_equal(played.lengths, runner.played.lengths)
        assert played.seconds["whole_s"].shape == (1, 5)
        assert (played.seconds["whole_s"] > played.seconds["drafting_s"] + played.seconds["verifying_s"]).all()
        assert (played.seconds["first_token_s"] > 0).all()
    other = replay_settings(recorded, CumulativeTokenProb(0.9))
    differs = (other.lengths != runners[1].played.lengths)[0].any(-1)
    assert differs.any()
    runners[1] = runner_of("cumulative_token_prob", POLICIES["cumulative_token_prob"], other)
    first, *_ = clock(loop, runners, recorded, range(5), repeats=1, name="made")
    assert np.array_equal(first.lengths, runners[0].played.lengths[:, ~differs])
    shifted = replace(other, lengths=np.roll(other.lengths, 1, axis=-1))
    runners[1] = runner_of("cumulative_token_prob", POLICIES["cumulative_token_prob"], shifted)
    with pytest.raises(ValueError, match="made: no response is decoded as it was replayed; record the trace again"):
        clock(loop, runners, recorded, range(5), repeats=1, name="made")


@pytest.mark.parametrize("kind", ["eagle", "rnn"])
def test_a_feature_draft_is_played_as_it_was_replayed(monkeypatch, kind):
    """Its first round reads the prompt, which the target's recorder must see."""
    pair, chains = Pair(target_of(kind), draft(kind), None, Words()), forms.traced(kind).select(range(4))
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", forms.EOS)
    settings = {"sampling": chains.sampling, "max_draft_length": chains.max_draft_length, "ends_at_eos": True}
    feature_loop = PrimedLoop(pair=pair, **settings)
    runners = runners_on(chains, {"fixed_length": FixedLength(2)})
    (played,) = clock(feature_loop, runners, chains, range(4), repeats=1, name="made")
    assert len(played.prompt_of_row) == 4


def test_a_primed_model_reads_its_prompt_once():
    """That it computes the same is what every other test of the clock shows."""
    primed = PrimedModel(model(1, 2), vocab_size=VOCAB)
    for prompt in (PROMPTS[0], PROMPTS[1][:1], PROMPTS[2] * 4):
        primed.prime(prompt)
        for _ in range(2):
            primed.feed([prompt[-1], EOS])
            primed.reset()
            assert len(primed) == len(prompt) - 1


def test_the_report_says_by_how_much_clock_and_prediction_differ_and_where(recorded):
    runners = runners_on(recorded)
    predicted = [COST.time_s(runner.played)[0] for runner in runners]
    verify_s = [0.005 * runner.played.counts.num_target[0] for runner in runners]
    # drafts three tenths slower than predicted and 0.1 ms beside the rounds of each generation, but for the first
    # family
    slower = [np.zeros(5), *(0.3 * (total - verify) for total, verify in zip(predicted[1:], verify_s[1:], strict=True))]
    rest = [0.0, 0.0001, 0.0001]
    on_clock = []
    agrees = [0, 1, 2, 3]
    for runner, total, verify, more, extra in zip(runners, predicted, verify_s, slower, rest, strict=True):
        parts = {"whole_s": total + more + extra, "drafting_s": total - verify + more, "verifying_s": verify}
        parts["first_token_s"] = total / 10
        seconds = {name: part[None] for name, part in parts.items()}
        on_clock.append(replace(runner.played, seconds=seconds).select([0], agrees))
    about = about_clock(on_clock[0], 1, num_repeats=3)
    report = report_of(on_clock, runners, COST, dataset="made", about=about)
    first, second, _ = report.rows
    assert [first[name] for name in ("difference", "draft", "verify", "rest")] == pytest.approx([0] * 4)
    assert first["request_p50_s"] == pytest.approx(np.median(predicted[0][agrees]))
    assert first["first_token_p95_s"] == pytest.approx(np.percentile(predicted[0][agrees] / 10, 95))
    total_s = predicted[1][agrees].sum()
    assert second["draft"] == pytest.approx(slower[1][agrees].sum() / total_s)
    assert second["rest"] == pytest.approx(0.0004 / total_s)
    assert second["difference"] == pytest.approx(1 / (1 + second["draft"] + second["verify"] + second["rest"]) - 1)
    gain = (1 + second["predicted_gain"].value) * (1 + second["difference"]) - 1
    assert second["clocked_gain"].value == pytest.approx(gain)
    assert "1 responses left out" in report.about
    assert f"{family(second['family']).label} {second['difference']:+.1%}, most of it drafting" in report.verdict
    assert report.verdict.endswith(f"{report.common:+.1%} is the median of all families")
    assert [row["policy"] for row in clock_table(report).rows] == [
        "best fixed length",
        "product of token probabilities",
        "AdaEDL",
    ]
    some = replay_settings(recorded.select(range(3)), FixedLength(2))
    assert np.array_equal(runners[0].played.select([0], range(3)).lengths, some.lengths)


def test_turns_of_a_conversation_are_clocked_together_and_count_as_one_prompt(recorded):
    """Rows lie as a trace has them: first turns, then second ones; the last row is another draw of the first."""
    ids = ("0", "1", "0#2", "1#2", "0")
    talks = replace(recorded, rows=tuple(replace(row, id=name) for row, name in zip(recorded.rows, ids, strict=True)))
    assert [clocked_rows(talks, num) for num in (1, 2, 9)] == [[0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    runners, rows = runners_on(talks), clocked_rows(talks, 2)
    seconds = np.random.default_rng(0).uniform(1, 2, (3, 1, 4))
    parts = ("whole_s", "first_token_s", "drafting_s", "verifying_s")
    on_clock = [
        replace(runner.played.select([0], rows), seconds=dict.fromkeys(parts, of))
        for runner, of in zip(runners, seconds, strict=True)
    ]
    report = report_of(on_clock, runners, COST, dataset="made", about=about_clock(on_clock[0], 0, num_repeats=1))
    emitted = [runner.played.counts.num_emitted[0, :4].reshape(2, 2).sum(0) for runner in runners]
    every = list(map(Throughput, emitted, seconds[:, 0].reshape(3, 2, 2).sum(1)))
    assert [row["clocked_gain"][:3] for row in report.rows] == [gain_over(every[0], other)[:3] for other in every]
    assert report.about.startswith("4 responses to 2 test prompts")


def test_a_clock_that_cannot_run_is_refused():
    for num_prompts, repeats, word in ((-1, 3, "clock"), (2, 0, "repeats")):
        with pytest.raises(ValueError, match=word):
            check_clock(num_prompts, repeats)
