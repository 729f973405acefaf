"""What `import decode` offers, and what it costs."""

import subprocess
import sys
from importlib import import_module

import pytest

PACKAGES = {"decode": 5, "heads": 3, "data_gen": 1}
"""Package -> the number of names that it offers."""


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_that_is_offered_is_there_and_documented(name):
    package = import_module(name)
    assert len(package.__all__) == PACKAGES[name]
    for offered in package.__all__:
        assert (getattr(package, offered).__doc__ or "").strip()
    with pytest.raises(AttributeError, match="has no attribute 'nothing_like_it'"):
        package.nothing_like_it  # noqa: B018


def test_importing_the_packages_imports_nothing_heavy_and_help_is_short():
    script = (
        "import sys, pydoc, decode, heads, data_gen;"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)));"
        "print(max(len(pydoc.render_doc(package).splitlines()) for package in (decode, heads, data_gen)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    heavy, num_lines = shown.splitlines()
    assert heavy == "[]"
    assert int(num_lines) < 60


def test_policies_import_no_model_of_transformers():
    script = "import sys; from decode import HeadPolicy; print('transformers.models.llama' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )
