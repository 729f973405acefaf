"""One YAML per experiment, the dataclasses that it is parsed into, and the parser that every command shares."""

from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, ModelSource, PairConfig, SamplingConfig

__all__ = ["Config", "DataConfig", "DecodeConfig", "HeadsConfig", "ModelSource", "PairConfig", "SamplingConfig"]
