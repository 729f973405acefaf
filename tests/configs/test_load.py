"""An experiment in Python: `load_config`, and paths of YAML files instead of a Config."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Trainer

from configs import load_config
from configs.command import run, takes_config
from configs.front import COMMANDS as FRONT_COMMANDS
from configs.load import yaml_of
from tests.cases import implementation_of


def test_a_yaml_gives_in_python_what_it_gives_on_the_command_line(tmp_path: Path):
    file = tmp_path / "experiment.yaml"
    file.write_text("pair:\n  target: {path: big}\n  draft: {path: small}\ndata: {split_weights: [3, 1, 1]}\n")
    for given in (str(file), file, "tiny"):
        config = load_config(given)
        assert config == run({"show": lambda config: config}, argv=["show", "--config", str(given)])
        assert config.arguments == ("--config", str(given))
        assert load_config(config) is config
        written = tmp_path / "again.yaml"
        written.write_text(yaml_of(config))
        assert load_config(written) == config, "a written experiment is read again"
    assert load_config("tiny", trainer=Trainer).trainer["devices"] == 1


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("mine.yaml", "'mine.yaml' is neither a file nor a shipped experiment"),
        (3, "the experiment is of type int; give a Config, or the path of a YAML file"),
        ("{tmp}/e.yaml", r"num_trian.* \(did you mean data\.num_train\?\)"),
    ],
)
def test_a_yaml_that_cannot_be_read_in_python_is_a_value_error_in_one_line(given: Any, complaint: str, tmp_path: Path):
    (tmp_path / "e.yaml").write_text("data: {num_trian: 5}\n")
    with pytest.raises(ValueError, match=complaint) as refused:
        load_config(given.format(tmp=tmp_path) if isinstance(given, str) else given)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("name", [name for name, (command, _) in FRONT_COMMANDS.items() if takes_config(command)])
def test_the_function_of_every_command_takes_the_path_of_a_yaml(name: str):
    function = implementation_of(name)
    parameters = [parameter for parameter in signature(function).parameters.values() if parameter.name != "config"]
    required = {parameter.name: "x" for parameter in parameters if parameter.default is parameter.empty}
    with pytest.raises(ValueError, match=r"'no-such\.yaml' is neither a file nor a shipped experiment"):
        function("no-such.yaml", **required)
