"""Tables about drafts: dev chooses by counts and times, test is clocked and chooses nothing, and gains are those of the
clock.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs.command import config_of, parser_for, run
from decode.experiment import Experiment
from decode.loop.counts import Counts
from decode.policies import Entropy, MaxProb, TokenProb
from evaluation.__main__ import COMMANDS
from evaluation.gain import Spent
from evaluation.hierarchies.built import Competitor, Setting
from evaluation.hierarchies.generations import Decoded
from evaluation.hierarchies.runs import Candidate
from evaluation.papers.drafts import Contest, stops_of
from evaluation.papers.gains import by_key, finalists_of, fitted, joined, line_rows, lines_of, stop_verdict

SMALL = (
    "--decode.num_dev",
    "1",
    "--decode.num_test",
    "2",
    "--decode.max_new_tokens",
    "10",
    "--decode.max_draft_length",
    "6",
)
GRID = ("--decode.grid", json.dumps({"fixed_length": {"k": [2]}, "entropy": {"max_sqrt_entropy": [0.3]}}))
SETTINGS = {k: Setting(f"k={k}", lambda: None) for k in (1, 2, 4)}
FIXED = Competitor("chain", 2, tuple(SETTINGS.values()))
STOP = Competitor("chain + stop", 2, (Setting("a=1", lambda: None), Setting("a=2", lambda: None)))
CONTEST = Contest(FIXED, SETTINGS[4], (STOP,))
FINALISTS = Contest(FIXED, SETTINGS[4], (Competitor(STOP.name, 2, STOP.settings[:1]),), SETTINGS[2])
ALONE = Competitor("target alone", 1, (Setting("", lambda: None),))


def decoded(
    *, rounds: int, length: int, emitted: int, draft_s: float = 0.0, target_s: float = 0.0, seconds: float = 1.0
) -> Decoded:
    """A generation of rounds of one length, its first round included."""
    counts = Counts(
        num_emitted=emitted, num_drafted=rounds * length, num_target=rounds, num_draft_forwards=rounds * length
    )
    lengths = (length,) * rounds
    return Decoded(
        counts=counts, lengths=lengths, seconds=seconds, later=counts, later_draft_s=draft_s, later_target_s=target_s
    )


def timed(rounds: int, length: int, emitted: int, stall: float = 1.0) -> Decoded:
    """At 1 + 2 f seconds for a draft of f forwards, and 10 + 3 k for a verification of k tokens."""
    draft_s, target_s = rounds * (1 + 2 * length), rounds * (10 + 3 * length)
    return decoded(rounds=rounds, length=length, emitted=emitted, draft_s=stall * draft_s, target_s=stall * target_s)


def dev_runs(stall: float = 1.0) -> list[Candidate]:
    """Length 2 emits most per second; its last generation may stall."""
    rounds = {1: (30, 28, 32), 2: (18, 20, 19), 4: (16, 15, 17)}
    runs = [
        Candidate(FIXED, SETTINGS[k], tuple(timed(number, k, 48) for number in numbers))
        for k, numbers in rounds.items()
    ]
    slow = (*runs[1].decoded[:2], timed(19, 2, 48, stall))
    stops = [
        Candidate(STOP, STOP.settings[0], (timed(30, 1, 48),) * 3),
        Candidate(STOP, STOP.settings[1], (timed(14, 3, 48),) * 3),
    ]
    return [runs[0], Candidate(FIXED, SETTINGS[2], slow), runs[2], *stops]


def test_the_times_of_a_draft_are_found_in_its_generations():
    assert fitted(dev_runs()[:3]) == pytest.approx((1, 2, 10, 3), rel=1e-3)


@pytest.mark.parametrize("stall", [1.0, 8.0])
def test_dev_chooses_what_counts_and_times_make_fastest_whatever_the_clock_stalled_at(stall):
    chosen = finalists_of(CONTEST, dev_runs(stall))
    assert chosen.best is SETTINGS[2]
    assert [stop.settings for stop in chosen.stops] == [(STOP.settings[1],)]
    assert [setting.label for setting in chosen.competitors[0].settings] == ["k=4", "k=2"]


def test_a_choice_without_dev_prompts_is_refused_and_none_needs_none():
    with pytest.raises(ValueError, match=r"decode\.num_dev"):
        finalists_of(CONTEST, [])
    alone = Contest(Competitor("chain", 2, (SETTINGS[4],)), SETTINGS[4], ())
    assert finalists_of(alone, []).best is SETTINGS[4]


def clocked(name: Competitor, setting: Setting, *seconds: float) -> Candidate:
    return Candidate(name, setting, tuple(decoded(rounds=5, length=2, emitted=10, seconds=each) for each in seconds))


def lines_at(stop_s: tuple[float, ...], best_s: tuple[float, ...] = (2.0, 2.0, 4.0, 4.0)):
    """Four prompts of two categories; the best fixed length takes half the time of the published one."""
    times = ((4.0, 4.0, 8.0, 8.0), best_s)
    runs = [clocked(FIXED, SETTINGS[k], *seconds) for k, seconds in zip((4, 2), times, strict=True)]
    runs += [clocked(STOP, STOP.settings[0], *stop_s), clocked(ALONE, ALONE.settings[0], 8.0, 8.0, 8.0, 8.0)]
    return lines_of(FINALISTS, by_key(runs)), runs[-1].measured


def test_a_toy_clock_gives_its_speed_ups_and_gains():
    lines, alone = lines_at((1.6, 1.6, 3.2, 3.2))
    rows = line_rows(lines, alone, ["a", "a", "b", "b"])
    assert [(row["Methods"], row["a"], row["b"], row["Avg."], row["setting"]) for row in rows] == [
        ("chain, as published", "2.00", "1.00", "1.33", "k=4"),
        ("chain, best fixed", "4.00", "2.00", "2.67", "k=2"),
        ("chain + stop", "5.00", "2.50", "3.33", "a=1"),
    ]
    assert [row["over best fixed"].split()[0] for row in rows if row["over best fixed"]] == ["-50.0%", "+25.0%"]
    assert rows[-1]["over published"].startswith("+150.0%")
    assert stop_verdict(lines, [FINALISTS]) == (
        "1 of 1 stops beat the best fixed length of the same draft on the clock: chain + stop +25.0% (+25.0%, +25.0%)"
    )


def test_a_gain_whose_interval_holds_0_beats_nothing():
    lines, _ = lines_at((1.0, 1.0, 4.5, 4.5))
    assert stop_verdict(lines, [FINALISTS]).startswith(
        "No stop beats the best fixed length of the same draft on the clock: chain + stop +9.1%"
    )


def test_a_stop_that_beats_an_unlucky_choice_alone_beats_nothing():
    lines, _ = lines_at((4.0, 4.0, 8.0, 8.0), best_s=(5.0, 5.0, 10.0, 10.0))
    assert line_rows(lines, lines[0].spent, ["a"] * 4)[-1]["over best fixed"].startswith("+25.0%")
    assert (
        stop_verdict(lines, [FINALISTS])
        == "No stop beats the best fixed length of the same draft on the clock: chain + stop +0.0% (+0.0%, +0.0%)"
    )


def test_a_single_prompt_proves_nothing():
    lines, _ = lines_at((1.6, 1.6, 3.2, 3.2))
    single = [
        replace(line, spent=first_of(line.spent), rivals={name: first_of(rival) for name, rival in line.rivals.items()})
        for line in lines
    ]
    assert stop_verdict(single, [FINALISTS]).startswith("No stop beats")


def first_of(spent: Spent) -> Spent:
    return Spent(spent.tokens[:1], spent.seconds[:1])


def test_datasets_are_merged_prompt_after_prompt():
    first, second = clocked(FIXED, SETTINGS[1], 1.0), clocked(FIXED, SETTINGS[1], 2.0, 3.0)
    assert joined([[first], [second]])[0].measured.seconds.tolist() == [1.0, 2.0, 3.0]
    assert joined([]) == []


def flags_of(directory: Path, *more: str) -> list[str]:
    where = ("--decode.dir", str(directory), "--heads.dir", str(directory))
    return ["tables", "--config", "configs/tiny.yaml", *where, *SMALL, *GRID, *more]


def printed(capsys, argv):
    capsys.readouterr()
    run(COMMANDS, argv=[*argv, "--json"])
    return json.loads(capsys.readouterr().out)["tables"]


@pytest.mark.slow
def test_the_clock_of_test_prompts_makes_the_gains_and_no_choice(capsys, tmp_path):
    argv = flags_of(tmp_path, "--paper", "svip-trees", "--pair.draft.path", "checkpoints/tiny/glide", "--repeats", "2")
    (first,) = printed(capsys, argv)
    path = tmp_path / "svip-table-3" / "glide" / "stories" / "decoded.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    tests = [line for line in lines if line["value"]["repeats"] == 2]
    assert not {line["key"]["prompt"] for line in tests} & {
        line["key"]["prompt"] for line in lines if line not in tests
    }
    paces = {"target alone": 4.0, "chain": 2.0, "chain + entropy": 1.0, "CaPE": 1.0, "CaPE + entropy": 2.0}
    for line in tests:
        line["value"]["seconds"] = paces[line["key"]["arm"]] * line["value"]["counts"]["num_emitted"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (second,) = printed(capsys, argv)
    assert [row["setting"] for row in second["rows"]] == [row["setting"] for row in first["rows"]]
    assert {row["Methods"]: row["Avg."] for row in second["rows"]} == {
        "chain, as published": "2.00",
        "chain, best fixed": "2.00",
        "chain + entropy": "4.00",
        "CaPE, as published": "4.00",
        "CaPE, best fixed": "4.00",
        "CaPE + entropy": "2.00",
    }
    assert second["note"].startswith("1 of 2 stops beat")
    assert "not so: CaPE + entropy -50.0%" in second["note"]
    assert len(path.read_text().splitlines()) == len(lines), "nothing was decoded again"


@pytest.mark.slow
def test_an_eagle_draft_stands_in_hsddws_first_table(capsys, tmp_path):
    argv = flags_of(tmp_path, "--paper", "hsddw", "--eagle", "checkpoints/tiny/eagle", "--repeats", "1")
    first, *_ = printed(capsys, argv)
    eagle = [f"EAGLE-2{how}" for how in (", as published", ", best fixed", " + entropy")]
    eagle += ["EAGLE, chain, best fixed", "EAGLE, chain + entropy"]
    assert [row[""] for row in first["rows"]] == ["AT", *eagle, "HSDDW", "PEARL, two devices, predicted"]
    assert first["rows"][0]["stories"] == "1.00x (1.00, 1.00)"
    assert all(row["setting"] for row in first["rows"][1:6])
    assert "on the clock" in first["note"]


REFUSED = {
    "no feature draft": (("--paper", "hsddw", "--eagle", "checkpoints/tiny/draft"), "no feature draft's directory"),
    "no EAGLE": (("--paper", "hsddw", "--eagle", "checkpoints/tiny/glide"), "give an EAGLE's directory"),
    "no repeats": (("--paper", "svip-trees", "--repeats", "0"), "at least once"),
    "no dev prompts": (("--paper", "svip-trees", "--decode.num_dev", "0"), "decode.num_dev"),
    "too short": (("--paper", "svip-trees", "--decode.max_draft_length", "5"), "published length of 6"),
    "no such stop": (("--paper", "svip-trees", "--stops", "[entropi]"), "there is no policy"),
    "an engine's rule": (
        ("--paper", "svip-trees", "--stops", "[llama_cpp]"),
        "--stops names llama_cpp, an engine's rule",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_table_is_refused_in_one_line(what, capsys, tmp_path):
    flags, message = REFUSED[what]
    with pytest.raises(SystemExit) as stopped:
        run(COMMANDS, argv=flags_of(tmp_path, *flags))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_stop_that_is_named_twice_has_one_row_of_its_own_name(tmp_path):
    parser = parser_for(COMMANDS["tables"])
    config = config_of(parser, parser.parse_args([*flags_of(tmp_path)[1:], "--paper", "svip-trees"]))
    specs = ("entropy", "entropy", "max_prob:min_max_prob=0.5", "entropy", "token_prob")
    stops = stops_of(Experiment(config), specs)
    assert [stop.name for stop in stops] == ["entropy", "max_prob:min_max_prob=0.5", "token_prob"]
    kinds = [type(next(iter(stop.settings.values()))) for stop in stops]
    assert kinds == [Entropy, MaxProb, TokenProb]
