"""What `import decode` offers, and what imports cost."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"decode": 5, "heads": 3, "data_gen": 1}
"""Package -> the number of names that it offers."""
DATA_FRAMES = {"pyarrow", "pandas", "matplotlib", "datasets", "pytorch_lightning", "torchmetrics", "jsonargparse"}
SERVING = [path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / "serve").rglob("*.py")]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_that_is_offered_is_there_and_documented(name):
    package = import_module(name)
    assert len(package.__all__) == PACKAGES[name]
    for offered in package.__all__:
        assert (getattr(package, offered).__doc__ or "").strip()
    with pytest.raises(AttributeError, match="has no attribute 'nothing_like_it'"):
        package.nothing_like_it  # noqa: B018


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        ("decode, heads, data_gen", {"torch", "transformers", "numpy"}),
        ("decode; decode.HeadPolicy", {"transformers.models.llama"}),
        # of an engine's processes: all that serves, and the plugin before a server asks for it
        pytest.param(
            ", ".join(".".join(parts) for parts in SERVING if parts[-1] != "__init__"),
            DATA_FRAMES | {"tensorboard", "vllm"},
            marks=pytest.mark.slow,
        ),
        pytest.param("serve.engine.plugin, serve.engine.proposer", {"transformers", "decode"}, marks=pytest.mark.slow),
    ],
)
def test_importing_the_packages_imports_nothing_heavy_and_help_is_short(imports, heavy):
    script = f"import sys, pydoc; import {imports}; print(sorted({heavy} & set(sys.modules)))"
    if imports.startswith("decode, "):
        script += "; print(max(len(pydoc.render_doc(each).splitlines()) for each in (decode, heads, data_gen)) < 60)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    expected = ["[]", "True"] if imports.startswith("decode, ") else ["[]"]
    assert done.stdout.split() == expected, done.stdout + done.stderr
