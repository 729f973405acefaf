"""`evaluation.evaluate`: an evaluation in Python, from an experiment, or from two models and a list of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any
from weakref import finalize

from transformers import PreTrainedTokenizerBase

from configs.limits import check_limits
from configs.load import load_config
from configs.paths import local_path
from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, PairConfig
from data_gen.from_prompts import PROMPTS_FILE, Model, Prompts, num_distinct, pair_of, prompt_records, save_prompts
from data_gen.prompts.files import Fields
from decode.experiment import Experiment
from decode.policies.base import Policy
from decode.policies.registry import POLICIES, RULES, read_spec
from evaluation.report.evaluated import Evaluation, evaluated
from heads.model.head import AcceptanceHead


def evaluate(
    experiment: Config | str | PurePath | None = None,
    *,
    target: Model | None = None,
    draft: Model | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompts: Prompts | None = None,
    **settings: Any,
) -> Evaluation:
    """Replay every policy and threshold on the trace of an experiment, which is recorded first, if need be, and judge
    them. Prints no results and writes no report; `acceptance-heads evaluate` does both.

    Args:
        experiment: a config, the path of a YAML, or the name of a shipped experiment; or None, and two models and
            prompts instead.
        target: the large model: a directory, a hub id, or a loaded model, as `data_gen.make_data` takes it.
        draft: the small model, with the same tokenizer.
        tokenizer: of both models; needed for a loaded model.
        prompts: at least 2, as `make_data` takes them; half are dev, half are test.
        settings: of `configs.schema.DecodeConfig`, such as max_new_tokens=64 or num_test=20, instead of the
            experiment's. `policies` may also have a policy with parameters, such as "entropy:max_sqrt_entropy=0.4" or
            "head:PATH", a `Policy`, or an `AcceptanceHead`. With prompts: `dir`, the directory of the trace, with which
            a second call continues (a temporary one by default); and `temperature` of the sampling (1.0).

    Raises:
        ValueError: neither or both of experiment and models, malformed prompts, an unknown or invalid setting, models
            that do not fit.
        FileNotFoundError: models, prompts or heads that do not exist.
    """
    if experiment is not None and (target is None or draft is None or prompts is None):
        config = load_config(experiment)
        decode = _decode_settings(settings, config.decode, heads=Path(config.decode.dir) / "heads")
        return evaluated(Experiment(replace(config, decode=decode)))
    if experiment is None and target is not None and draft is not None and prompts is not None:
        return _of_models(target, draft, prompts, settings, tokenizer=tokenizer)
    raise ValueError("give an experiment, or target, draft and prompts")


def _of_models(
    target: Model,
    draft: Model,
    prompts: Prompts,
    settings: dict[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Evaluation:
    # a policy with another head reads the trace again, so a temporary folder lives as long as the result
    scratch = None if "dir" in settings else TemporaryDirectory(prefix="evaluation-")
    root = local_path(settings.pop("dir", "") if scratch is None else scratch.name, "dir")
    pair = pair_of(target, draft, root / "models", tokenizer=tokenizer, temperature=settings.pop("temperature", 1.0))
    evaluation = evaluated(Experiment(_config(pair, prompt_records(prompts), root, settings)))
    if scratch is not None:
        finalize(evaluation, scratch.cleanup)
    return evaluation


def _config(pair: PairConfig, records: Sequence[Fields], root: Path, settings: Mapping[str, Any]) -> Config:
    """The experiment of two models and prompts, which are written to a file: half of them are dev, half are test."""
    num_prompts = num_distinct(records)
    if num_prompts < 2:
        raise ValueError(f"prompts has {num_prompts} different ones; give at least 2: for dev and test")
    num_dev = num_prompts // 2
    num_test = num_prompts - num_dev
    decode = DecodeConfig(dir=str(root / "decode"), num_dev=num_dev, num_test=num_test)
    config = Config(
        pair=pair,
        data=DataConfig(
            dir=str(root / "data"),
            prompts=str(root / PROMPTS_FILE),
            num_train=0,
            num_dev=num_dev,
            num_test=num_test,
            split_weights=(0, num_dev, num_test),
        ),
        heads=HeadsConfig(dir=str(root / "heads")),
        decode=_decode_settings(settings, decode, heads=root / "heads" / "given"),
    )
    check_limits(config)
    save_prompts(root / PROMPTS_FILE, records)
    return config


def _decode_settings(settings: Mapping[str, Any], base: DecodeConfig, *, heads: Path) -> DecodeConfig:
    """Settings of `evaluate` on top of others; heads that are given as objects are saved in `heads`."""
    known = DecodeConfig.__dataclass_fields__.keys()
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"{unknown[0]!r} is not a setting of evaluate; it takes {', '.join(sorted(known))}")
    decode = replace(base, **{name: value for name, value in settings.items() if name != "policies"})
    if "policies" not in settings:
        return decode
    names: list[str] = []
    paths = list(decode.heads)
    grid = {name: dict(values) for name, values in decode.grid.items()}
    if isinstance(settings["policies"], str | Policy | AcceptanceHead):
        raise ValueError(f"policies is {settings['policies']!r:.80}; give a list of policies")
    for policy in settings["policies"]:
        name, parameters = _spec_of(policy)
        head = parameters.pop("head", None)
        if isinstance(head, AcceptanceHead):
            path = heads / f"{head.timing}-{head.fingerprint()[:12]}"
            head.save_pretrained(path)
            head = str(path)
        if head is not None:
            paths.append(head)
        names.append(name)
        for parameter, value in parameters.items():
            values = grid.setdefault(name, {}).setdefault(parameter, [])
            if value not in values:
                values.append(value)
    return replace(decode, policies=tuple(dict.fromkeys(names)), heads=tuple(dict.fromkeys(paths)), grid=grid)


def _spec_of(policy: object) -> tuple[str, dict[str, Any]]:
    """The name of a policy, and its parameters that differ from the defaults."""
    if isinstance(policy, AcceptanceHead):
        return "head", {"head": policy}
    if isinstance(policy, str):
        name, parameters = read_spec(policy)
    elif isinstance(policy, Policy):
        kind = type(policy)
        known = (name for name, entry in (POLICIES | RULES).items() if entry.kind is kind)
        name = next(known, f"{kind.__module__}:{kind.__qualname__}")
        parameters = {}
        for parameter in fields(policy):  # type: ignore[arg-type]
            value = getattr(policy, parameter.name)
            if not isinstance(value, type(parameter.default)) or value != parameter.default:
                parameters[parameter.name] = value
    else:
        raise ValueError(f"policies has {policy!r:.80}; an entry is a name, name:parameter=value, a Policy or a head")
    if parameters.get("max_rejection_prob") == "auto":  # `auto` competes wherever a head does
        del parameters["max_rejection_prob"]
    return name, parameters
