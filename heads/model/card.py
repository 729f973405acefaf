"""The model card (README.md) of an exported head: shape, usage, training data, metrics, threshold."""

from functools import cache
from pathlib import Path

from huggingface_hub import ModelCard
from jinja2 import ChainableUndefined, Environment, Template

from heads.model.formula import PAPERS
from heads.model.inputs import SIGNALS, Inputs
from lm.signals import SCALARS
from store.json_files import Json

_TEXT = Path(__file__).with_name("card.jinja")
_SECTIONS = ("front_matter", "summary", "verdict", "usage", "trained_on", "measured", "threshold")


def model_card(config: Json, *, num_parameters: int) -> ModelCard:
    """The card of one head, from its config.json."""
    text = "\n\n".join(section for section in _sections(config, num_parameters).values() if section)
    return ModelCard(f"{text}\n", ignore_metadata_errors=False)


def description(config: Json, *, num_parameters: int) -> str:
    """The card's sections for a terminal: summary, metrics, threshold, verdict, training data."""
    none_yet = "## Recommended threshold\n\nnone yet; run `acceptance-heads tune` to choose one"
    sections = _sections(config, num_parameters)
    sections["threshold"] = sections["threshold"] or none_yet
    shown = ("summary", "measured", "threshold", "verdict", "trained_on")
    return "\n\n".join(sections[name] for name in shown if sections[name])


def _sections(config: Json, num_parameters: int) -> dict[str, str]:
    inputs = Inputs.from_config(config)
    facts = {"architecture": PAPERS, "papers": PAPERS, "num_parameters": num_parameters} | config
    facts["symbols"] = [SCALARS[name].symbol for name in inputs.scalars]
    facts["symbol_of_signal"] = SCALARS[SIGNALS[config["timing"]]].symbol
    macros = _template().make_module(facts)
    return {name: str(getattr(macros, name)()).strip() for name in _SECTIONS}


@cache
def _template() -> Template:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=ChainableUndefined)
    return environment.from_string(_TEXT.read_text(encoding="utf-8"))
