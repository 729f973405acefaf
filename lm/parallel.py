"""Tensor parallelism (`tp_plan: auto`): one model in slices, in processes that torchrun started, each with its own GPU.

transformers slices a model by the plan of its class. Every process runs the same forwards, which wait for each other.
Hidden states and logits are whole in every process, and equal those of the unsliced model up to the order of sums.
"""

import os
from datetime import timedelta

import torch
from torch import distributed
from transformers import PretrainedConfig
from transformers.distributed import DistributedConfig

from configs.schema import ModelSource, PairConfig

# maximum wait of a forward for another process, which may still read its slice from a slow disk
_FORWARD_TIMEOUT = timedelta(hours=2)


def sliced_models(pair: PairConfig) -> tuple[str, ...]:
    """The models of a pair that are sliced."""
    return tuple(name for name in ("target", "draft", "micro") if getattr(getattr(pair, name), "tp_plan", None))


def slices_of(whose: str) -> tuple[int, int]:
    """(rank, number of slices) of this process; ValueError, naming `whose` tp_plan, if torchrun did not start it."""
    rank, num = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdigit() and num.isdigit() and os.environ.get("MASTER_ADDR")):
        raise ValueError(
            f"tp_plan of {whose} is set, and this process was not started by torchrun; start it as torchrun "
            "--standalone --nproc_per_node GPUS -m data_gen --config FILE, or use device_map: auto"
        )
    return int(rank), int(num)


def refuse_sliced(pair: PairConfig, command: str) -> None:
    """Raise ValueError if a model has tp_plan, and the command runs in one process."""
    if names := sliced_models(pair):
        raise ValueError(
            f"pair.{names[0]}.tp_plan is for making data, and {command} runs in one process; set it to null, and "
            "device_map: auto for a model that one GPU cannot hold"
        )


def check_slices(source: ModelSource, config: PretrainedConfig, count: int) -> None:
    """Raise ValueError for a model that cannot be cut into so many slices, or for settings that exclude tp_plan."""
    where = f"tp_plan of {source.path}"
    for name, value in (("device_map", source.device_map), ("quantization", source.quantization)):
        if value is not None:
            raise ValueError(f"{where} is {source.tp_plan} and {name} {value!r}; leave one of them out")
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"{where} is {source.tp_plan}, and transformers has no such plan for {text.model_type}; use device_map: "
            "auto, which puts whole layers on each GPU"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (number := getattr(text, name, None)) is not None and number % count:
            raise ValueError(
                f"{where} is {source.tp_plan} in {count} processes, and {name} {number} is no multiple of {count}; "
                "start a number of processes that divides it"
            )


def slicing_of(source: ModelSource, config: PretrainedConfig) -> DistributedConfig:
    """transformers' settings for this process's slice; joins the processes of torchrun if they are not joined
    yet. ValueError outside torchrun, or for a model or settings that cannot be sliced (`check_slices`).
    """
    _, num = slices_of(source.path)
    check_slices(source, config, num)
    if "tp_plan" not in DistributedConfig.__dataclass_fields__:
        raise ValueError(
            "tp_plan needs a newer transformers, whose DistributedConfig has it: pip install -U transformers"
        )
    join()
    return DistributedConfig(tp_plan=source.tp_plan, tp_size=num)


def join() -> None:
    """Make the processes of torchrun one group, and take the GPU of this one: NCCL between GPUs, gloo between CPUs."""
    if distributed.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, timeout=_FORWARD_TIMEOUT)
