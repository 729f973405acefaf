"""The compiled step, really compiled: in a process of its own, since what checks shapes in this one does not
compile.
"""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from lm import CachedModel, CompiledModel

tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
for epsilon, feeds in ((1e-6, ((4, 1), (7, 3), (9, 1))), (1e-1, ((4, 1),))):
    torch.manual_seed(0)
    sizes = dict(vocab_size=20, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2)
    config = LlamaConfig(**sizes, num_hidden_layers=1, rms_norm_eps=epsilon)
    model = AutoModelForCausalLM.from_config(config).eval()
    compiled, plain = CompiledModel(model, capacity=8), CachedModel(model)
    for each in (compiled, plain):
        each.forward(tokens[:3])
    for length, num_rows in feeds:
        rows = [each.forward(tokens[:length], num_rows) for each in (compiled, plain)]
        torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    for each in (compiled, plain):
        each.roll_back(3)
    torch.testing.assert_close(compiled.forward(tokens[:4]), plain.forward(tokens[:4]), rtol=1e-4, atol=1e-5)
print("alike")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_forwards_are_those_of_their_own_model_width_and_capacity():
    """Two models that differ where no guard looks (the norm), two widths, a growth, weights that change."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert found.stdout.split()[-1:] == ["alike"], found.stderr[-2000:]
