"""The three sources of responses behind one interface (`ResponseSource`), and what text has to pass to become tokens.

Text that comes from outside is turned into ids and back: prompt ids + response ids must decode to prompt text + response text. A response
that does not is a `Problem`, never altered. (A response whose ids spell the same text in another way than the target did cannot be told;
servers that return token ids avoid that.)
"""

from collections.abc import Mapping

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import Config
from data_gen.responses import FinishReason, Problem, Request, Response, ResponseSource, TargetInProcess
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
        from data_gen.completions import CompletionsServer

        return CompletionsServer(config, tokenizer, sampling, eos_ids)
    if config.data.source == "file":
        from data_gen.response_file import ResponseFile

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


def response_of_text(
    text: str, finish_reason: FinishReason, request: Request, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]
) -> Response | Problem:
    """A response's ids from its text, the end-of-sequence id added where it stopped; a `Problem` if they do not spell it.

    The response is tokenized on its own, and if that does not join the prompt, together with it.
    """
    alone, prompt, joint = (
        list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (text, request.text, request.text + text)
    )
    candidates = [alone] + ([joint[len(prompt) :]] if joint[: len(prompt)] == prompt else [])
    expected = _decoded(request.prompt_ids, tokenizer) + text
    for ids in candidates:
        if _decoded(request.prompt_ids + ids, tokenizer) == expected:
            return finished(ids, finish_reason, request, tokenizer, eos_ids)
    return Problem(request.id, "error", f"response does not round-trip through the tokenizer: {text[:60]!r}")


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def finished(
    ids: list[int], finish_reason: FinishReason, request: Request, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]
) -> Response | Problem:
    """The response with its end-of-sequence id; a `Problem` if nothing is left of it."""
    if finish_reason == "stop" and eos_ids and not (ids and ids[-1] in eos_ids):
        ids = [*ids, tokenizer.eos_token_id if tokenizer.eos_token_id in eos_ids else min(eos_ids)]
    if not ids:
        return Problem(request.id, "error", "empty response")
    wrong = next((token for token in ids if not 0 <= token < len(tokenizer)), None)
    if wrong is not None:
        return Problem(request.id, "error", f"response id {wrong} is outside the tokenizer's {len(tokenizer)}")
    early = next((position for position, token in enumerate(ids[:-1]) if token in eos_ids), None)
    if early is not None:
        return Problem(request.id, "error", f"end-of-sequence id at position {early} of a response of {len(ids)} tokens")
    return Response(ids, finish_reason)
