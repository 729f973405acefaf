"""The plugin's entry point: vLLM calls `register` at the start of each of its processes.

A server without `acceptance_heads` in `--additional-config` is unchanged. With it, the configuration is checked before
any model is loaded, and an error ends the start with one line.
"""

import sys
from functools import wraps
from pathlib import Path
from typing import Any

from serve import KEY


def register() -> None:
    """Replace vLLM's proposer, and check its configuration after it is created; idempotent."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.spec_decode import draft_model

    from serve.engine.proposer import stopping

    if getattr(EngineArgs.create_engine_config, "checks", None) == KEY:
        return
    EngineArgs.create_engine_config = _checked(EngineArgs.create_engine_config, vllm.__version__)
    proposer: Any = stopping(draft_model.DraftModelProposer)
    draft_model.DraftModelProposer = proposer


def _checked(create: Any, version: str) -> Any:

    @wraps(create)
    def checked(*args: Any, **kwargs: Any) -> Any:
        config = create(*args, **kwargs)
        if KEY in (config.additional_config or {}):
            from serve.engine.conditions import check_conditions
            from serve.engine.policies import policies_of

            try:
                check_conditions(config, version)
                policies_of(config)
            except (ValueError, FileNotFoundError) as error:
                if is_server():
                    sys.exit(f"error: {KEY}: {error}")
                raise
        return config

    checked.checks = KEY  # type: ignore[attr-defined]
    return checked


def is_server() -> bool:
    """Whether vLLM's own program runs in this process, where an error is one line and not a traceback."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).name == "vllm" or (spec is not None and spec.name.startswith("vllm."))
