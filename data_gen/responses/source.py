"""The three sources of responses behind one interface (`ResponseSource`)."""

from collections.abc import Mapping

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import Config
from data_gen.responses.exchange import ResponseSource
from data_gen.responses.in_process import TargetInProcess
from lm import Sampling


def make_source(
    config: Config, models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> ResponseSource:
    """The source that `data.source` names. `models` are those that are loaded: beside the draft, the target keeps its states for labelling.

    Raises:
        ValueError: a setting that the source needs or cannot honour.
    """
    eos_ids = eos_ids_of(config, tokenizer)
    if config.data.source == "server":
        from data_gen.responses.server import CompletionsServer

        return CompletionsServer(config, tokenizer, sampling, eos_ids)
    if config.data.source == "file":
        from data_gen.responses.from_file import ResponseFile

        return ResponseFile(config.data, tokenizer, eos_ids)
    return TargetInProcess(
        model=models["target"],
        sampling=sampling,
        vocab_size=len(tokenizer),
        eos_ids=eos_ids,
        max_new_tokens=config.data.max_new_tokens,
        batch_size=config.data.batch_size,
        keeps_states="draft" in models,
    )


def eos_ids_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The target's end-of-sequence ids (its generation config may name several), or the tokenizer's."""
    source = config.pair.target
    try:
        ids = GenerationConfig.from_pretrained(source.path, revision=source.revision or "main").eos_token_id
    except OSError:
        ids = None
    ids = tokenizer.eos_token_id if ids is None else ids
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])
