"""A setting that needs an extra says which one, before anything is made."""

import sys

import pytest

from configs.command import run
from data_gen.pipeline.command import make


@pytest.mark.parametrize(
    ("module", "setting", "extra"),
    [("ray", ["--data.engine", "ray"], "ray"), ("openai", ["--data.source", "server"], "serving")],
)
def test_a_missing_extra_is_one_line_that_names_it(module, setting, extra, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)  # another test of this process may have imported it
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(SystemExit, match="2"):
        run({"make": make}, default="make", argv=["--config", "tiny", "--data.dir", str(tmp_path / "data"), *setting])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"install the extra `{extra}`" in error
    assert not (tmp_path / "data").exists()
