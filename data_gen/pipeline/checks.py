"""Checks of an experiment's settings before anything is loaded: contradictions, absent packages and files, and the
longest texts that models read, by their configs.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from configs.hints import meant
from configs.schema import DataConfig, ModelSource, PairConfig
from data_gen.prompts.prompt import say_once
from data_gen.prompts.templates import TEMPLATES
from data_gen.responses.top_logprobs import num_logprobs_of
from lm import Sampling, model_config
from lm.features.released import max_positions_of, released_layout_of
from lm.pair import without_weights
from lm.parallel import sliced_models
from lm.rope import refuse_crossing

_FEW_PROMPTS = 50
_NEEDED = (
    ("engine", "ray", "ray", "ray", "engine: local"),
    ("source", "server", "openai", "serving", "source: transformers"),
    ("labels", "server", "openai", "serving", "labels: target"),
)
"""(setting, value, the module that it needs, the extra that installs it, what needs none)."""


def check_settings(pair: PairConfig, data: DataConfig) -> None:
    """Raise ValueError for settings that contradict each other or miss something, before anything is loaded."""
    sampling = Sampling(**vars(pair.sampling))
    is_feature_draft = released_layout_of(pair.draft) is not None
    if data.template not in TEMPLATES:
        raise ValueError(f"data.template is {data.template!r}; {meant(data.template, TEMPLATES)}")
    if data.mode != "together" and is_feature_draft:
        raise ValueError(
            f"data.mode is {data.mode}, but pair.draft is a feature draft, which needs the target's states; set "
            "data.mode: together"
        )
    other = "data.engine is ray" if data.engine == "ray" else "pair.draft is a feature draft"
    if (names := sliced_models(pair)) and (data.engine == "ray" or is_feature_draft):
        raise ValueError(f"pair.{names[0]}.tp_plan is set and {other}, which needs whole models; use device_map: auto")
    if data.source == "file" and data.responses is None:
        raise ValueError("data.source is file, but data.responses is null; set it to the path of a JSONL file")
    for name, file in (("split_ids", data.split_ids), ("responses", data.responses if data.source == "file" else None)):
        if file is not None and not Path(file).is_file():
            raise FileNotFoundError(
                f"data.{name} is {file}, but there is no such file; remove the setting or correct the path"
            )
    if data.labels == "server":
        num_logprobs_of(sampling, data.server.num_logprobs)
        problem = ""
        if data.source == "transformers":
            problem = "data.source is transformers, which runs the target in this process; set data.source: server"
        elif data.server.kind != "vllm":
            problem = f"data.server.kind is {data.server.kind}, whose log-probabilities lack token ids; set it to vllm"
        elif is_feature_draft:
            problem = "pair.draft is a feature draft, which reads the target's states; choose another draft"
        if problem:
            raise ValueError(f"data.labels is server, but {problem}, or data.labels: target")
    for name, value, module, extra, needless in _NEEDED:
        if getattr(data, name) == value and find_spec(module) is None:
            raise ValueError(
                f"data.{name} is {value}, but {module} is not installed; install the extra `{extra}`, or use {needless}"
            )


def hint_at_few(num_prompts: int, setting: str) -> None:
    """Warn once if there are too few prompts for useful heads and comparisons."""
    if num_prompts < _FEW_PROMPTS:
        say_once(
            f"note: {setting} has {num_prompts} prompts, enough for a trial; for results, use a few hundred for "
            f"training and at least {_FEW_PROMPTS} each for dev and test"
        )


def check_lengths(pair: PairConfig, data: DataConfig, names: Sequence[str] = ("draft", "target")) -> None:
    """Raise ValueError if a model cannot read the longest text of the config; no weights are loaded."""
    longest = data.max_prompt_tokens + data.max_new_tokens
    subject = f"data.max_prompt_tokens + data.max_new_tokens is {longest}"
    for name in names:
        source: ModelSource = getattr(pair, name)
        limit = limit_of(source)
        if limit is not None and longest > limit:
            raise ValueError(
                f"{subject} and {name} {source.path} reads at most {limit} positions; lower either setting"
            )
        if released_layout_of(source) is None:
            refuse_crossing(
                without_weights(source),
                0,
                longest,
                subject=subject,
                remedy=f"lower either setting for {name} {source.path}",
            )


def limit_of(source: ModelSource) -> int | None:
    """The longest sequence that a model or a feature draft reads, by its config; None if it sets no limit."""
    if released_layout_of(source) is not None:
        return max_positions_of(source)
    return getattr(model_config(source).get_text_config(), "max_position_embeddings", None)
