"""vLLM configurations that the plugin supports; any other ends the start with one line that names the flag to set.

Stopping per request needs synchronous scheduling (the asynchronous scheduler reserves a fixed draft length), the V1
runner (V2 drafts a fixed length and trims by the values of drafted tokens) and a single process.
"""

from typing import Any

from serve import KEY

TRIED = ("0.32",)
"""Tested releases of vLLM. Others are refused, since the plugin overrides methods that are not a public interface."""
_ONE_PROCESS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
_MODES = ("parallel_drafting", "use_heterogeneous_vocab", "use_local_argmax_reduction", "disable_padded_drafter_batch")


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
