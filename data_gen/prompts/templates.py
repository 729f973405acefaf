"""The text and token ids of a prompt.

Named templates: `chat` is the tokenizer's own; `plain` is the text alone; `llama2`, `humaneval` and `gsm8k` are the
wrappers of SpecDec++ (arXiv 2405.19715, `data/gen_dataset.py`): Llama-2's [INST] around the text, inside it
WizardCoder's instruction for HumanEval and MetaMath's for GSM8K. Training, traces and decoding all use `encode`, so
that heads see the same form of prompt everywhere.
"""

import json
from collections.abc import Callable, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.hints import meant
from data_gen.prompts.prompt import Prompt

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


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template: str, replies: Sequence[str] = ()) -> list[int]:
    """Token ids of the conversation up to the target's next reply; `replies` answer the turns before it."""
    return encode_text(render(prompt, tokenizer, template, replies), tokenizer, template)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Token ids of a rendered prompt."""
    # A chat template writes the special tokens into the text; with all others the tokenizer adds them.
    return list(tokenizer(text, add_special_tokens=template != "chat")["input_ids"])


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template: str, replies: Sequence[str] = ()) -> str:
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


def _chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], replies: Sequence[str]) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; set data.template to one of "
            f"{', '.join(_WRAPPERS)}"
        )
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for index, turn in enumerate(turns):
        messages.append({"role": prompt.roles[index] if prompt.roles else "user", "content": turn})
        if index < len(replies):
            messages.append({"role": "assistant", "content": replies[index]})
    try:
        tools = json.loads(prompt.tools or "[]") or None
    except ValueError:
        tools = prompt.tools
    if not isinstance(tools, list | None):
        raise ValueError(f"prompt {prompt.id}: tools are {prompt.tools[:80]!r}; give a JSON list")
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ValueError(
            f"prompt {prompt.id}: the chat template of {tokenizer.name_or_path} refuses messages of the roles {roles}: "
            f"{error}; remove such prompts or columns, or set data.template: plain"
        ) from error


def _llama2(texts: Sequence[str], replies: Sequence[str], system: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """[INST] … [/INST] reply </s><s>[INST] … [/INST]; the tokenizer adds the first <s>."""
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token or ""
    heads = [f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else "", *[""] * len(replies)]
    answers = [*(f" {reply.strip()} {eos}{bos}" for reply in replies), ""]
    turns = zip(heads, texts, answers, strict=True)
    return "".join(f"[INST] {head}{text.strip()} [/INST]{answer}" for head, text, answer in turns)
