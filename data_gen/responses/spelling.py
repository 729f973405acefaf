"""What text has to pass to become token ids.

Text that comes from outside is turned into ids and back: prompt ids + response ids must decode to prompt text + response text. A response
that does not is a `Problem`, never altered. (A response whose ids spell the same text in another way than the target did cannot be told;
servers that return token ids avoid that.)
"""

from transformers import PreTrainedTokenizerBase

from data_gen.responses.exchange import FinishReason, Problem, Request, Response


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
