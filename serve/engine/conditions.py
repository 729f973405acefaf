"""What of vLLM the plugin supports: everything else ends the start with one line that says what to set.

Stopping per request needs a scheduler that waits for the drafts (its asynchronous twin has put placeholders for a fixed
number of tokens in their place), the V1 runner (V2 drafts a fixed number, and trims by values of drawn tokens), and one
process that decides.
"""

from typing import Any

from serve import KEY

TRIED = ("0.32",)
"""Releases of vLLM whose proposer has been read and tested; others are refused, since its methods are no public
interface.
"""
_ONE_PROCESS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
_MODES = ("parallel_drafting", "use_heterogeneous_vocab", "use_local_argmax_reduction", "disable_padded_drafter_batch")


def check_conditions(config: Any, version: str) -> None:
    """Pass a server's configuration.

    Args:
        config: a `VllmConfig` in which vLLM has settled what the user left open.
        version: the release of vLLM.

    Raises:
        ValueError: something in it that the plugin does not support.
    """
    release = ".".join(version.split(".")[:2])
    if release not in TRIED:
        _refuse(f"it was tested with vLLM {', '.join(TRIED)} and this is {version}; install vllm=={TRIED[-1]}.*")
    drafting = config.speculative_config
    if drafting is None or drafting.method != "draft_model":
        method = None if drafting is None else drafting.method
        _refuse(
            f"it stops the drafts of a draft model, and the speculative method is {method}; set --speculative-config "
            '\'{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 20, "draft_sample_method": '
            '"probabilistic"}\''
        )
    for name in _MODES:
        if getattr(drafting, name, False):
            _refuse(f"it does not support {name}; leave it out of --speculative-config")
    if config.scheduler_config.async_scheduling:
        _refuse("it does not support asynchronous scheduling, which fixes the draft length; set --no-async-scheduling")
    if config.use_v2_model_runner:
        _refuse("it does not support vLLM's V2 runner; set VLLM_USE_V2_MODEL_RUNNER=0 in the environment")
    for name in _ONE_PROCESS:
        if (size := getattr(config.parallel_config, name, 1)) > 1:
            _refuse(f"{name} is {size} and it supports 1; set --{name.replace('_', '-')} 1")


def _refuse(reason: str) -> None:
    raise ValueError(f"{KEY} cannot run here: {reason}; or leave {KEY} out of --additional-config")
