"""The policies of a server, from vLLM's configuration."""

import logging
from collections.abc import Callable
from typing import Any

from configs.schema import ModelSource
from data_gen.store.identity import describe_model
from serve import KEY
from serve.settings import Policies, Settings


def policies_of(config: Any) -> Policies:
    """The policies of a `VllmConfig`.

    Raises:
        ValueError: invalid settings, or heads that do not fit.
        FileNotFoundError: no exported head at a path.
    """
    drafting = config.speculative_config
    warn = logging.getLogger("vllm." + KEY).warning  # a child of vLLM's logger, which has its handlers
    if drafting.draft_sample_method == "greedy":
        warn(
            '%s: draft_sample_method is greedy, which lowers acceptance at temperature > 0; set "draft_sample_method": '
            '"probabilistic" in --speculative-config',
            KEY,
        )
    return Policies(
        Settings.parsed(config.additional_config[KEY]),
        hidden_size=drafting.draft_model_config.get_hidden_size(),
        draft=_description(drafting.draft_model_config, "--speculative-config's model"),
        target=_description(config.model_config, "--model"),
        warn=warn,
    )


def _description(model: Any, role: str) -> Callable[[], dict[str, Any]]:
    source = ModelSource(path=model.model, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return lambda: {
        "role": role,
        "path": model.model,
        **describe_model(source),
    }
