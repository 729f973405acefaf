"""The entry point: vLLM calls `register` in each of its processes, before it makes anything.

Nothing changes for a server whose `--additional-config` has no `acceptance_heads`. One that has it is checked where it
is configured, before any model is loaded, so that what does not fit ends the start with one line.
"""

from functools import wraps
from typing import Any

from serve import KEY


def register() -> None:
    """Put the stopping proposer in the place of vLLM's, and the check behind its configuration; a second call changes
    nothing.
    """
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
    def checked(*args: Any, **how: Any) -> Any:
        config = create(*args, **how)
        if KEY in (config.additional_config or {}):
            from serve.engine.conditions import check_conditions
            from serve.engine.policies import policies_of

            check_conditions(config, version)
            policies_of(config)
        return config

    checked.checks = KEY  # type: ignore[attr-defined]
    return checked
