"""One YAML per experiment, the dataclasses that it is parsed into, and the parser that every command shares.

    config = load_config("experiment.yaml")      the experiment, as `--config experiment.yaml` reads it

`dataclasses.replace` changes settings: replace(config, decode=replace(config.decode, num_test=20)).
"""

from configs.load import load_config
from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, ModelSource, PairConfig, SamplingConfig

__all__ = [
    "Config",
    "DataConfig",
    "DecodeConfig",
    "HeadsConfig",
    "ModelSource",
    "PairConfig",
    "SamplingConfig",
    "load_config",
]
