"""The README.md beside an exported head: what it is, what it was trained on, how it fared, how to use it."""

from typing import Any

from huggingface_hub import ModelCard

from data_gen.labels.scalars import SCALARS
from heads.model.architectures import PAPERS
from heads.model.inputs import Inputs

_WHEN = {
    "fed": "once the token has been fed to the draft",
    "drawn": "once the token is drawn",
    "prefix": "before a token is drawn and whichever it will be",
    "candidate": "once the token is chosen for a tree",
}
"""Words for each timing."""
_SPECDEC = "SpecDec++ (arXiv 2405.19715)"
_METHODS = {
    "fed": _SPECDEC,
    **dict.fromkeys(("drawn", "prefix", "candidate"), f"the loss and architecture of {_SPECDEC}, at another time"),
}
_TRUTHS = {"prefix": "acceptance_rate", "candidate": "the target's probability of the token"}


def model_card(config: dict[str, Any], *, num_parameters: int) -> ModelCard:
    """The card of one head, from its config.json alone."""
    sections = [
        _front_matter(),
        _summary(config, num_parameters),
        _usage(config),
        _trained_on(config),
        _measured(config),
        _threshold(config),
    ]
    return ModelCard("\n\n".join(section for section in sections if section) + "\n", ignore_metadata_errors=False)


def description(config: dict[str, Any], *, num_parameters: int) -> str:
    """What the card says of a head, for a terminal: what it is, how it fared, its threshold, its training."""
    threshold = _threshold(config) or "## Recommended threshold\n\nnone yet; `acceptance-heads tune` finds it"
    sections = [_summary(config, num_parameters), _measured(config), threshold, _trained_on(config)]
    return "\n\n".join(section for section in sections if section)


def _front_matter() -> str:
    return (
        "---\nlibrary_name: acceptance-heads\ntags:\n- speculative-decoding\n- acceptance-prediction\n- "
        "pytorch_model_hub_mixin\n---"
    )


def _summary(config: dict[str, Any], num_parameters: int) -> str:
    inputs = ["the draft's final hidden state"]
    taken = Inputs.of(config["scalars"], config.get("embedding", False), config["timing"])
    inputs += [" and ".join(SCALARS[name].symbol for name in taken.scalars)] if taken.scalars else []
    inputs += ["the token's embedding"] if taken.embedding else []
    return (
        "# Acceptance-prediction head\n\n"
        f"Predicts, {_WHEN[config['timing']]}, the probability that the target will accept a drafted token, from "
        f"{', '.join(inputs)}. "
        f"{config['num_layers']} {_blocks(config)} of width {config['hidden_size']}, {num_parameters:,} parameters, "
        f"accept weight {config['accept_weight']:g}, reject weight {config['reject_weight']:g}.\n\n"
        f"Method: {_METHODS[config['timing']]}."
    )


def _blocks(config: dict[str, Any]) -> str:
    architecture = config.get("architecture", PAPERS)
    blocks = "residual block" if config["num_layers"] == 1 else "residual blocks"
    return blocks if architecture == PAPERS else f"{blocks} ({architecture})"


def _usage(config: dict[str, Any]) -> str:
    inputs = "".join(
        [", scalars" if config["scalars"] else "", ", embedding=embedding" if config.get("embedding") else ""]
    )
    return (
        '```python\nfrom heads import AcceptanceHead\n\nhead = AcceptanceHead.from_pretrained("this-directory")\n'
        f"logit = head(hidden{inputs})  # hidden: [tokens, {config['hidden_size']}]\n"
        "head.raw(logit), head.calibrated(logit)\n```"
    )


def _trained_on(config: dict[str, Any]) -> str:
    facts = {
        "draft": _model(config.get("draft")),
        "target": _model(config.get("target")),
        "sampling": _pairs(config.get("sampling")),
        **({"token mixing ratio": config.get("mixing_ratio")} if config["timing"] == "fed" else {}),
        **config.get("training", {}),
    }
    return "## Trained on\n\n" + "\n".join(
        f"- {name}: {value if value not in (None, '') else 'unknown'}" for name, value in facts.items()
    )


def _measured(config: dict[str, Any]) -> str:
    numbers = {name: value for name, value in config.get("metrics", {}).items() if isinstance(value, int | float)}
    if not numbers:
        return ""
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in numbers.items())
    truth = _TRUTHS.get(config["timing"], "the true acceptance probability")
    return (
        "## Measured on the dev split\n\n| metric | value |\n|---|---|\n"
        f"{rows}\n\ntrain_raw_kl: on as many training responses. "
        f"KL is the binary divergence from {truth}, in nats per drafted token. "
        f"Calibrated: shifted by ln(w_rej/w_acc), temperature {config['calibration_temperature']:.4f}, fitted on the "
        "same split."
    )


def _threshold(config: dict[str, Any]) -> str:
    """The threshold and how it was chosen; what `auto` reads besides stays in config.json."""
    recommended = config.get("recommended", {})
    if "max_rejection_prob" not in recommended:
        return ""
    kind = "calibrated" if recommended.get("is_calibrated") else "raw"
    prompts = f"{recommended['num_prompts']} prompts of " if "num_prompts" in recommended else ""
    costs = f" at these costs: {recommended['costs']}" if "costs" in recommended else ""
    return (
        f"## Recommended threshold\n\nmax_rejection_prob {recommended['max_rejection_prob']:g}, of the {kind} "
        "probability: a draft ends once the risk that one of its tokens is rejected is larger. Of a fine grid it has "
        f"the most predicted tokens per second on {prompts}the dev split, by replay{costs}. All numbers are in "
        "config.json, under `recommended`."
    )


def _model(source: dict[str, Any] | None) -> str:
    if not source:
        return "unknown"
    return f"`{source.get('path')}`" + (f" at revision {source['revision']}" if source.get("revision") else "")


def _pairs(values: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items())
