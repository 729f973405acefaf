"""`Prompt`, and its parsing from records of prompt sets.

A record is recognised by the first of `_FORMS` that it has; a `prompt` may also be a list of messages (DPO).
Replies in a conversation are dropped, because the target writes its own. docs/data.md has the table of all
fields.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from configs.hints import meant
from data_gen.prompts.files import Fields, Record

_ID_FIELDS = ("id", "idx", "task_id", "question_id")
_CONVERSATIONS = {"messages", "conversations", "conversation"}
_QUESTIONS = ("instruction", "question", "prompt", "text")
_CONTEXTS = ("input", "context")
_SYSTEMS = ("system", "system_prompt")
_MESSAGES = "a list of messages with the strings 'role' and 'content', or 'from' and 'value'"
_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("tool", "observation", "function"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bot", "function_call"), "assistant"),
}
"""Role in a set -> role in chat templates."""
_SPEAKERS = ("user", "tool")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FORMS = ("messages", "conversations", "conversation", "turns", *_QUESTIONS)
_BESIDE = {*_ID_FIELDS, *_CONTEXTS, *_SYSTEMS, "tools", "category"}
"""Fields that are read in addition to one of the `_FORMS`."""
_MAPPABLE = dict.fromkeys((*_FORMS, *_ID_FIELDS, *_CONTEXTS, *_SYSTEMS, "history", "tools", "category"))
"""Names that `data.prompts.columns` may map."""
_GROUPS = (_FORMS, _ID_FIELDS, _CONTEXTS, _SYSTEMS)
"""Names of the same part of a prompt: once one of them is mapped, the others are not read."""
_FACTS = {
    *("final", "test", "entry_point", "source", "dataset", "model", "language", "score", "conversation_id"),
    *("prompt_id", "title", "timestamp", "turn", "metadata", "is_impossible"),
}
"""Columns that never belong to a prompt: facts about the record."""
_OF_REPLIES = {
    *("answer", "answers", "response", "responses", "output", "outputs", "completion", "completions", "reply"),
    *("replies", "solution", "solutions", "chosen", "rejected", "reference", "label", "labels", "target", "targets"),
    *("gold", "assistant", "generated", "generation", "generations", "expected", "groundtruth", "truth"),
}
"""Words in the names of columns that hold replies, such as gpt4_response and modelAnswer."""
_OF_PROMPTS = (
    *("prompt", "prompts", "question", "questions", "query", "queries", "instruction", "instructions", "problem"),
    *("task", "request", "user", "human", "input", "inputs", "text", "content", "message", "dialogue"),
)
"""Words in the names of columns that hold prompts, the likeliest first."""


@dataclass(frozen=True)
class Prompt:
    """The user's side of one conversation with the target."""

    id: str
    """The same in every run: it names the row."""
    turns: tuple[str, ...]
    """The user's messages in order, without the target's replies between them."""
    context: str = ""
    """Material that belongs to the first turn (Alpaca's `input`); the template decides how it is joined."""
    system: str = ""
    tools: str = ""
    """JSON list of the tools that a chat template describes to the model."""
    roles: tuple[str, ...] = ()
    """Role of each turn, user or tool; (): all are user."""
    category: str = ""
    set: str = field(default="", repr=False, compare=False)
    """Name of its set, if the run has several; the id begins with it."""

    @property
    def is_text(self) -> bool:
        """Whether all of it can be encoded."""
        return all(map(is_text, self.content))

    @property
    def content(self) -> tuple[str, ...]:
        """Everything that a model reads; prompts with the same content are duplicates."""
        return *self.turns, *self.roles, self.context, self.system, self.tools

    @property
    def text(self) -> str:
        """The first turn with its context."""
        return f"{self.turns[0]}\n{self.context}" if self.context else self.turns[0]


def is_text(text: str) -> bool:
    """Whether a string can be encoded; JSON allows a lone surrogate, half of a character, which no tokenizer reads."""
    return _SURROGATE.search(text) is None


def prompts_of(records: Iterable[Record], columns: Mapping[str, str]) -> tuple[list[Prompt], dict[str, str]]:
    """The prompts of a set, and location -> reason of each unreadable record; `columns`: our name of a field ->
    the set's name. ValueError if at least half of the records cannot be read.
    """
    _check_columns(columns)
    prompts: dict[str, tuple[str, Prompt]] = {}
    problems: dict[str, str] = {}
    unused: set[str] = set()
    rivals: dict[str, set[str]] = {}
    for where, default_id, record in records:
        try:
            if isinstance(record, ValueError):
                raise record
            mapped = _mapped(record, columns)
            prompt = prompt_of(mapped, default_id=default_id)
            if prompt.id in prompts:
                raise ValueError(f"id {prompt.id!r} is used by an earlier record; give each record a unique id")
            prompts[prompt.id] = (where, prompt)
            form = str(_form_of(mapped))
            ignored = {name for name in _unused(mapped, form) if not _holds_reply(mapped, name)}
            rivals.setdefault(form, set()).update(ignored.intersection(_FORMS))
            unused |= ignored.difference(_FORMS)
        except ValueError as error:
            problems[where] = str(error)
    problems |= _without_taken(prompts)
    if problems and len(problems) >= len(prompts):
        where, reason = next(iter(problems.items()))
        num = f"{len(problems)} of {len(problems) + len(prompts)} records cannot be read"
        raise ValueError(f"{where}: {reason} ({num})")
    if prompts:
        _report_ignored(re.sub(r"(:| record )\d+$", "", where), rivals, unused)
    return [prompt for _, prompt in prompts.values()], problems


def row_id(prompt: Prompt, turn: int) -> str:
    """The prompt's id; from its second turn on with the number of the turn, as in `81#2`."""
    return prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}"


def _without_taken(prompts: dict[str, tuple[str, Prompt]]) -> dict[str, str]:
    """Remove prompts whose id is that of a later turn of another prompt; location -> reason of each."""
    problems: dict[str, str] = {}
    for _, prompt in list(prompts.values()):
        for name in (row_id(prompt, turn) for turn in range(1, len(prompt.turns))):
            if (taken := prompts.pop(name, None)) is not None:
                problems[taken[0]] = (
                    f"id {name!r} is that of a later turn of the record {prompt.id!r}; give each record a unique id "
                    "without #"
                )
    return problems


def _check_columns(columns: Mapping[str, str]) -> None:
    """Raise ValueError for a name that no prompt has, or for two columns that would be the prompt or its id."""
    for name in columns:
        if name not in _MAPPABLE:
            raise ValueError(f"data.prompts.columns maps {name!r}, which is not a field: {meant(name, _MAPPABLE)}")
    for group in (_FORMS, _ID_FIELDS):
        if len(names := [name for name in group if name in columns]) > 1:
            raise ValueError(
                f"data.prompts.columns maps both {names[0]} and {names[1]}, of which only one is read; remove one"
            )


def _mapped(record: Fields, columns: Mapping[str, str]) -> Fields:
    """The record under our names: what a mapping replaces is left out, so that the mapping decides. ValueError
    if the record lacks a mapped column.
    """
    if missing := [column for column in columns.values() if column not in record]:
        fields = ", ".join(sorted(record))
        raise ValueError(f"there is no column {missing[0]!r} (data.prompts.columns); it has {fields}")
    kept = {name: value for name, value in without_replaced(record, columns).items() if name not in columns.values()}
    return kept | {name: record[column] for name, column in columns.items()}


def without_replaced(known: Fields, columns: Mapping[str, str]) -> Fields:
    """A record, or a known set's mapping, without what a user's mapping of the same part of a prompt replaces."""
    replaced = {name for group in _GROUPS if not columns.keys().isdisjoint(group) for name in group}
    return {name: value for name, value in known.items() if name not in replaced}


def _report_ignored(path: str, rivals: Mapping[str, Iterable[str]], unused: Iterable[str]) -> None:
    """Name, once, the columns that hold another candidate for the prompt, and those that no prompt uses."""
    for form, names in ((form, sorted(names)) for form, names in rivals.items() if names):
        say_once(
            f"{path}: the prompt is read from the column {form}, not from {', '.join(names)}; to choose another, map "
            f"it: data.prompts: {{path: ..., columns: {{prompt: {names[0]}}}}}"
        )
    if names := sorted(unused):
        plural = "s" if len(names) > 1 else ""
        say_once(
            f"{path}: ignoring the column{plural} {', '.join(names)}; to use one, map it: data.prompts: {{path: ..., "
            f"columns: {{context: {names[0]}}}}} (or system, tools, ...)"
        )


@cache
def say_once(line: str) -> None:
    """Print a line to stderr, once per process."""
    print(line, file=sys.stderr)


def prompt_of(record: Fields, *, default_id: str) -> Prompt:
    """The prompt of one record; `default_id` is used if it has no id. ValueError: it has no readable prompt."""
    prompt_id = next((str(record[name]) for name in _ID_FIELDS if record.get(name) is not None), default_id)
    _check(is_text(prompt_id), "the id to be text, not a lone surrogate", prompt_id)
    if (form := _form_of(record)) is None:
        raise ValueError(
            f"expected one of the fields {', '.join(_FORMS)}; got {', '.join(sorted(record))}; map one of them, such "
            f"as data.prompts: {{path: ..., columns: {{prompt: {_likeliest(record)}}}}}"
        )
    value = record[form]
    context = "\n".join(_texts(record, _CONTEXTS))
    systems = _texts(record, _SYSTEMS)
    roles: tuple[str, ...] = ()
    if form in _CONVERSATIONS or _is_messages(value):
        messages = _messages_of(value)
        roles = tuple(role for role, _ in messages if role in _SPEAKERS)
        turns = tuple(text for role, text in messages if role in _SPEAKERS)
        _check("user" in roles, "at least one user message", value)
        systems.append("\n\n".join(text for role, text in messages if role == "system"))
    elif form == "turns":
        is_list = isinstance(value, list) and value and all(isinstance(turn, str) for turn in value)
        _check(is_list, "turns to be a list of strings", value)
        turns = tuple(value)
    else:
        _check(isinstance(value, str), f"{form} to be a string", value)
        turns, context = _after_history(record.get("history") or [], value, context)
    tools = record.get("tools")
    _check(tools is None or isinstance(tools, str | list), "tools to be a list, or the JSON of one", tools)
    return Prompt(
        prompt_id,
        turns,
        context=context,
        system="\n\n".join(filter(None, systems)),
        tools=tools if isinstance(tools, str) else json.dumps(tools) if tools else "",
        roles=roles if "tool" in roles else (),
        category=str(record.get("category") or ""),
    )


def conversation_of(messages: Sequence[Mapping[str, object]]) -> tuple[Prompt, list[str]]:
    """The conversation of some messages and its replies so far; the last message is the user's or a tool's.

    Raises:
        ValueError: malformed messages, or another order than turns and replies in alternation.
    """
    record = {"messages": [dict(message) for message in messages]}
    prompt = prompt_of(record, default_id="prompt")
    read = _messages_of(record["messages"])
    roles = [role for role, _ in read]
    replies = [text for role, text in read if role == "assistant"]
    if [role == "assistant" for role in roles if role != "system"] != [False, True] * len(replies) + [False]:
        raise ValueError(
            f"messages have the roles {', '.join(roles)}; give turns and replies in alternation, a turn last"
        )
    return prompt, replies


def _form_of(record: Fields) -> str | None:
    if not _CONVERSATIONS & record.keys() and _is_messages(record.get("prompt")):
        return "prompt"
    present = [name for name in _FORMS if name in record]
    return next((name for name in present if record[name] is not None), present[0] if present else None)


def _likeliest(record: Fields) -> str:
    """The column that probably holds the prompt, as YAML has it: one named like a prompt, else the longest text,
    never a reply; COLUMN if there is none.
    """
    texts = {name: value for name, value in record.items() if isinstance(value, str) and value.strip()}
    names = [name for name in texts if not _holds_reply(record, name)]
    named = [name for word in _OF_PROMPTS for name in names if word in _words(name)]
    name = named[0] if named else max(names, key=lambda name: len(texts[name]), default="COLUMN")
    return name if re.fullmatch(r"\w[\w.-]*", name) else json.dumps(name, ensure_ascii=False)


def _holds_reply(record: Fields, name: str) -> bool:
    """Whether a column holds a reply, by its name or because its text includes that of such a column."""
    if _OF_REPLIES & _words(name):
        return True
    text = record[name]
    replies = [record[other] for other in record if _OF_REPLIES & _words(other)]
    return isinstance(text, str) and any(reply and reply in text for reply in replies if isinstance(reply, str))


def _words(name: str) -> set[str]:
    """The words of a column's name in lower case: model_answer, modelAnswer and Model Answer have two."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def _unused(record: Fields, form: str) -> set[str]:
    """Non-empty fields of a record that its prompt, read from `form`, ignores, except facts about it."""
    known = _BESIDE | _FACTS | {form} | ({"history"} if form in _QUESTIONS else set())
    return {name for name, value in record.items() if value and name not in known}


def _after_history(history: Any, question: str, context: str) -> tuple[tuple[str, ...], str]:
    """The turns of a history and a question, and the context of the first one."""
    is_list = isinstance(history, list) and all(
        isinstance(pair, list) and pair and isinstance(pair[0], str) for pair in history
    )
    _check(is_list, "history to be a list of [question, reply], both strings", history)
    if history and context:  # it belongs to the question
        question = f"{question}\n{context}"
        context = ""
    return (*(pair[0] for pair in history), question), context


def _messages_of(value: Any) -> list[tuple[str, str]]:
    """(role, text) of messages: {role, content} or {from, value}; a reply that is no string is empty."""
    # some Parquet files store such a list as a dict of columns
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)]
    _check(value == [] or _is_messages(value), _MESSAGES, value)
    return [_message(message) for message in value]


def _message(message: Fields) -> tuple[str, str]:
    role = _ROLES.get(str(message.get("role", message.get("from"))).lower())
    content = message.get("content", message.get("value"))
    _check(role is not None, f"{_MESSAGES}, and a role of {', '.join(_ROLES)}", message)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "\n".join(str(part.get("text") or "") for part in content)
    if role == "assistant" and not isinstance(content, str):  # a tool call
        content = ""
    _check(isinstance(content, str), _MESSAGES, message)
    return str(role), str(content)


def _is_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _texts(record: Fields, names: Sequence[str]) -> list[str]:
    """Fields that are strings, without empty ones."""
    values = ["" if record.get(name) is None else record[name] for name in names]
    for name, value in zip(names, values, strict=True):
        _check(isinstance(value, str), f"{name} to be a string", value)
    return [value for value in values if value]


def _check(is_right: object, expected: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"expected {expected}, got {value!r:.80}")
