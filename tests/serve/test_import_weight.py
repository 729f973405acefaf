"""What the engine's processes have to load for the plugin is little."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    "pyarrow",
    "pandas",
    "matplotlib",
    "datasets",
    "pytorch_lightning",
    "torchmetrics",
    "jsonargparse",
    "tensorboard",
    "vllm",
)


@pytest.mark.slow
def test_serving_loads_no_data_frames_and_no_plots():
    modules = [
        path.relative_to(ROOT).with_suffix("").parts
        for path in sorted((ROOT / "serve").rglob("*.py"))
        if path.stem != "__init__"
    ]
    imports = "; ".join(f"import {'.'.join(parts)}" for parts in modules)
    code = f"{imports}; import sys; print(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_the_plugin_itself_loads_nothing_of_the_project_before_a_server_asks_for_it():
    code = (
        "import sys; import serve.engine.plugin, serve.engine.proposer; print({'transformers', 'decode'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "set()", done.stderr
