"""A dtype that this CPU has no arithmetic for is told, once; float32 never is."""

import torch
from torch import nn

from lm.models import emulated


def test_a_dtype_is_told_once_where_it_is_slow(capsys, monkeypatch):
    monkeypatch.setattr(emulated, "seconds_over_float32", lambda dtype: 6.2)
    for _ in range(2):
        emulated.tell_emulated(nn.Linear(4, 4, dtype=torch.bfloat16), "models/some")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("models/some: this CPU has no arithmetic for bfloat16")
    assert "6 times as long as with dtype: float32" in lines[0]


def test_what_is_quick_is_not_told(capsys, monkeypatch):
    monkeypatch.setattr(emulated, "seconds_over_float32", lambda dtype: 0.6)
    emulated.tell_emulated(nn.Linear(4, 4, dtype=torch.bfloat16), "models/quick")
    emulated.tell_emulated(nn.Linear(4, 4), "models/float32")
    assert capsys.readouterr().err == ""


def test_the_ratio_is_of_this_cpu():
    assert emulated.seconds_over_float32(torch.bfloat16) > 0
