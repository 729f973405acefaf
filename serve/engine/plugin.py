"""The plugin's entry point: vLLM calls `register` at the start of each of its processes.

A server without `acceptance_heads` in `--additional-config` is unchanged. With it, the configuration is checked
before any model is loaded, and an error ends the start with one line that names the flag to set. Stopping per
request needs synchronous scheduling (the asynchronous scheduler reserves a fixed draft length), the V1 runner (V2
drafts a fixed length and trims by the values of drafted tokens) and a single process.
"""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from serve import KEY

TRIED = ("0.32",)
"""Tested releases of vLLM. Others are refused, since the plugin overrides methods that are not a public interface."""
_ONE_PROCESS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
_MODES = ("parallel_drafting", "use_heterogeneous_vocab", "use_local_argmax_reduction", "disable_padded_drafter_batch")


def register() -> None:
    """Replace vLLM's proposer, and check its configuration after it is created; idempotent."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.spec_decode import draft_model

    from serve.engine.proposer import stopping

    if getattr(EngineArgs.create_engine_config, "checks", None) == KEY:
        return
    EngineArgs.create_engine_config = _checked(EngineArgs.create_engine_config, vllm.__version__)
    draft_model.DraftModelProposer = stopping(draft_model.DraftModelProposer)  # type: ignore[misc]


def _checked(create: Callable[..., Any], version: str) -> Callable[..., object]:

    @wraps(create)
    def checked(*args: object, **kwargs: object) -> object:
        config = create(*args, **kwargs)
        if KEY in (config.additional_config or {}):
            from serve.engine.stops import policies_of

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


def check_conditions(config: Any, version: str) -> None:
    """Raise ValueError if the plugin does not support a server's configuration.

    Args:
        config: a `VllmConfig`, with vLLM's defaults filled in.
        version: the version of vLLM.
    """
    release = ".".join(version.split(".")[:2])
    if release not in TRIED:
        _refuse(f"it supports vLLM {', '.join(TRIED)}, but this is {version}; install vllm=={TRIED[-1]}.*")
    drafting = config.speculative_config
    if drafting is None or drafting.method != "draft_model":
        method = None if drafting is None else drafting.method
        _refuse(
            f"it needs the speculative method draft_model, but the method is {method}; set --speculative-config "
            '\'{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 20, "draft_sample_method": '
            '"probabilistic"}\''
        )
    for name in _MODES:
        if getattr(drafting, name, False):
            _refuse(f"it does not support {name}; remove it from --speculative-config")
    if config.scheduler_config.async_scheduling:
        _refuse("it does not support asynchronous scheduling, which fixes the draft length; set --no-async-scheduling")
    if config.use_v2_model_runner:
        _refuse("it does not support vLLM's V2 runner; set VLLM_USE_V2_MODEL_RUNNER=0 in the environment")
    for name in _ONE_PROCESS:
        if (size := getattr(config.parallel_config, name, 1)) > 1:
            _refuse(f"{name} is {size}, but it supports only 1; set --{name.replace('_', '-')} 1")


def _refuse(reason: str) -> None:
    raise ValueError(f"the plugin {KEY} cannot run: {reason}, or remove {KEY} from --additional-config")
