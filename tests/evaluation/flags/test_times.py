"""Times from outside: numbers, pairs of numbers, an engine's log; and those fitted to runs of transformers."""

import numpy as np
import pytest

from evaluation.flags.times import curve_of, fitted, given_times

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
    curves, _ = given_times(None, None, logs_in(tmp_path, LOG + STATISTICS, LOG))
    assert float(curves.draft(1)) == pytest.approx(0.002)
    assert curves.target([1, 4, 7]).tolist() == pytest.approx([0.009, 0.0145, 0.02])


def logs_in(directory, *texts: str) -> str:
    paths = [directory / f"{number}.log" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return ",".join(map(str, paths))


def test_flags_and_logs_that_give_no_times_are_refused(tmp_path):
    for flags, problem in (
        ((4, None, None), "go together"),
        ((4, 30, "server.log"), "give one of them"),
        ((4, "5:30,1:20", None), "t_target_ms is 5:30,1:20"),
        ((4, -3, None), "t_target_ms is -3"),
        ((4, "fast", None), "t_target_ms is fast"),
    ):
        with pytest.raises(ValueError, match=problem):
            given_times(*flags)
    for texts, problem in (
        (["nothing", LOG], "no `eval time`"),
        ([LOG], "with a draft is missing"),
        ([LOG + STATISTICS], "without a draft is missing"),
        ([LOG, (LOG + STATISTICS).replace("900.00", "250.00")], "leaves 0.000 ms|leaves -"),
    ):
        with pytest.raises(ValueError, match=f"({problem}).*--t_draft_ms"):
            given_times(None, None, logs_in(tmp_path, *texts))


def test_the_fit_finds_the_times_that_runs_were_made_of_whatever_a_few_outliers_are():
    generator = np.random.default_rng(0)
    runs = []
    for number in range(120):
        drafts, rounds, plain = 0, 0, 64
        if number % 6:
            drafts, rounds, plain = int(generator.integers(20, 90)), int(generator.integers(8, 40)), 0
        seconds = 0.02 + 0.003 * drafts + 0.011 * rounds + 0.008 * plain + 1e-4 * generator.standard_normal()
        runs.append((drafts, rounds, plain, seconds * (3.0 if number % 17 == 0 else 1.0)))
    times = fitted(runs)
    assert times.t_draft_s == pytest.approx(0.003, rel=0.02)
    assert times.t_target_s == pytest.approx((0.008, 0.011), rel=0.02)
    assert 0 < times.errors.drafting < 0.05
    assert 0 < times.errors.verifying < 0.05
