"""The text and token ids of a prompt.

Named templates: `chat` is the tokenizer's own; `plain` is the text alone; `llama2`, `humaneval` and `gsm8k` are
the wrappers of SpecDec++ (arXiv 2405.19715, `data/gen_dataset.py`): Llama-2's [INST] around the text, inside it
WizardCoder's instruction for HumanEval and MetaMath's for GSM8K. Training, traces and decoding all use `encode`,
so that heads see the same form of prompt everywhere.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from configs.hints import meant
from data_gen.prompts.files import Fields
from data_gen.prompts.prompt import Prompt, say_once

if TYPE_CHECKING:  # transformers takes long to import
    from transformers import PreTrainedTokenizerBase

_BELOW = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_WRAPPERS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "llama2": lambda text: text,
    "humaneval": lambda text: (
        f"{_BELOW}\n\n\n### Instruction:\nCreate a Python script for this problem:\n{text}\n\n### Response:"
    ),
    "gsm8k": lambda text: f"{_BELOW}\n\n### Instruction:\n{text}\n\n### Response: Let's think step by step.",
}
TEMPLATES = ("chat", *_WRAPPERS)
_DATE = date(2024, 7, 26)
"""The date in chat templates that write today's: rows, traces and generations of any day have the same prompt.
It is the one that Llama 3's template writes where it knows none."""
_TODAY = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_MAX_SHOWN = 600
_FAILURES = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What running a chat template may raise."""


class RefusedPromptError(ValueError):
    """The chat template does not take one prompt; others may pass."""


def encode(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", template: str, replies: Sequence[str] = ()
) -> list[int]:
    """Token ids of the conversation up to the target's next reply; `replies` answer the turns before it."""
    return encode_text(render(prompt, tokenizer, template, replies), tokenizer, template)


def encode_text(text: str, tokenizer: "PreTrainedTokenizerBase", template: str) -> list[int]:
    """Token ids of a rendered prompt."""
    bare_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if template == "chat":  # which writes the special tokens into the text; with all others the tokenizer adds them
        return bare_ids
    ids = list(tokenizer(text)["input_ids"])
    for start in range(len(ids) - len(bare_ids)):  # something follows the text, such as end-of-sequence
        if bare_ids and ids[start : start + len(bare_ids)] == bare_ids:
            ending = tokenizer.decode(ids[start + len(bare_ids) :])
            say_once(
                f"note: the tokenizer of {tokenizer.name_or_path} ends each text with {ending!r} (EOS: end-of-sequence "
                "or another special token); it is removed from prompts, which the target continues"
            )
            return ids[: start + len(bare_ids)]
    return ids


def show_first(prompts: Iterable[Prompt], tokenizer: "PreTrainedTokenizerBase", template: str) -> None:
    """Print the first prompt that is not empty as the models read it; RefusedPromptError if the chat template
    refuses every prompt.
    """
    refused: RefusedPromptError | None = None
    for prompt in (prompt for prompt in prompts if prompt.is_text and prompt.text.strip()):
        try:
            print(line_of_prompt(prompt, tokenizer, template))
            return
        except RefusedPromptError as error:
            refused = refused or error
    if refused is not None:
        raise refused


def line_of_prompt(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", template: str) -> str:
    """A line with the first turn of a prompt as the models read it, special tokens included."""
    ids = encode(prompt, tokenizer, template)
    text = str(tokenizer.decode(ids))
    if len(text) > _MAX_SHOWN:
        text = f"{text[: _MAX_SHOWN // 2]} ... {text[-_MAX_SHOWN // 2 :]}"
    return f"one prompt as the models read it, {len(ids)} tokens: {text!r}"


def render(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", template: str, replies: Sequence[str] = ()) -> str:
    """The text that `encode` tokenizes."""
    if template not in TEMPLATES:
        raise ValueError(f"data.template is {template!r}; {meant(template, TEMPLATES)}")
    turns = prompt.turns[: len(replies) + 1]
    if template == "chat":
        return _chat(prompt, tokenizer, (prompt.text, *turns[1:]), replies)
    before_context = "\nInput: " if template == "llama2" else "\n"
    first = f"{turns[0]}{before_context}{prompt.context}" if prompt.context.strip() else turns[0]
    texts = [_WRAPPERS[template](text) for text in (first, *turns[1:])]
    if template == "plain":  # turns and replies alternate; the last turn has no reply yet
        texts[0] = f"{prompt.system}\n{texts[0]}" if prompt.system else texts[0]
        return "\n".join(part for pair in zip(texts, [*replies, ""], strict=True) for part in pair if part)
    return _llama2(texts, replies, prompt.system, tokenizer)


def _chat(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", turns: Sequence[str], replies: Sequence[str]) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; set data.template to one of "
            f"{', '.join(_WRAPPERS)}"
        )
    messages = _messages_of(prompt, turns, replies)
    tools = _tools_of(prompt)
    template = _undated(tokenizer, has_tools=tools is not None)
    text = _attempt(messages, tokenizer, tools, template)
    if isinstance(text, str) and _has_all(text, messages):
        return text
    # templates of models that also read images expect a list of parts
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    of_parts = _attempt(parts, tokenizer, tools, template)
    is_whole = isinstance(of_parts, str) and _has_all(of_parts, messages)
    # a template that does not loop over the parts writes the list itself, as Python does
    if is_whole and not any(str(part["content"]) in str(of_parts) for part in parts):
        return str(of_parts)
    if isinstance(text, Exception):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        kind = "" if type(text) is TemplateError else f"{type(text).__name__}: "
        raise RefusedPromptError(
            f"prompt {prompt.id}: the chat template of {tokenizer.name_or_path} refuses messages of the roles {roles}: "
            f"{kind}{text}; remove such prompts or columns, or set data.template: plain"
        ) from text
    raise RefusedPromptError(
        f"prompt {prompt.id}: the chat template of {tokenizer.name_or_path} leaves out the user's words, also as a "
        "list of text parts; use the template of the model's own text examples, or set data.template: plain"
    )


def _messages_of(prompt: Prompt, turns: Sequence[str], replies: Sequence[str]) -> list[Fields]:
    messages: list[Fields] = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for index, turn in enumerate(turns):
        messages.append({"role": prompt.roles[index] if prompt.roles else "user", "content": turn})
        if index < len(replies):
            messages.append({"role": "assistant", "content": replies[index]})
    return messages


def _tools_of(prompt: Prompt) -> list[Fields | Callable[..., object]] | None:
    try:
        tools = json.loads(prompt.tools or "[]") or None
    except ValueError:
        tools = prompt.tools
    if not isinstance(tools, list | None):
        raise RefusedPromptError(f"prompt {prompt.id}: tools are {prompt.tools[:80]!r}; give a JSON list")
    return tools


def _undated(tokenizer: "PreTrainedTokenizerBase", *, has_tools: bool) -> str:
    """The chat template with a fixed date instead of today's."""
    template = tokenizer.get_chat_template(tools=[] if has_tools else None)
    dated = _TODAY.sub(lambda call: repr(_DATE.strftime(call[2])), template)
    if dated != template:
        say_once(
            f"note: the chat template of {tokenizer.name_or_path} writes today's date; prompts have {_DATE:%d %b %Y} "
            "instead, so that rows and responses of different days agree"
        )
    if "strftime_now(" in dated:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} writes today's date in a computed form, so prompts of "
            "different days would differ; write a fixed date into the template"
        )
    return dated


def _attempt(
    messages: list[Fields],
    tokenizer: "PreTrainedTokenizerBase",
    tools: list[Fields | Callable[..., object]] | None,
    template: str,
) -> str | Exception:
    """The text of a chat template, or what running it raised."""
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )
    except _FAILURES as error:
        return error


def _has_all(text: str, messages: Sequence[Fields]) -> bool:
    """Whether a rendering has the words of every user message, whatever the template does to spaces."""
    solid = "".join(text.split())
    return all("".join(message["content"].split()) in solid for message in messages if message["role"] == "user")


def _llama2(texts: Sequence[str], replies: Sequence[str], system: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """[INST] … [/INST] reply </s><s>[INST] … [/INST]; the tokenizer adds the first <s>."""
    bos = tokenizer.bos_token or ""
    eos = tokenizer.eos_token or ""
    heads = [f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else "", *[""] * len(replies)]
    answers = [*(f" {reply.strip()} {eos}{bos}" for reply in replies), ""]
    turns = zip(heads, texts, answers, strict=True)
    return "".join(f"[INST] {head}{text.strip()} [/INST]{answer}" for head, text, answer in turns)
