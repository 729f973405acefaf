"""Random files of prompts, read and rendered as `init` and `data` do: `python -m tests.data_gen.fuzz_prompts 2000 0`
(number of records, seed) prints what became of them, and each fault.

A fault is an error that is no refusal in one line, a well-formed record that is not read, or a rendered prompt that
lacks the user's words or has a reply's. Users' words and replies carry marks, by which they are recognised.
"""

import csv
import gzip
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.schema import PromptSource
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.sets import read, set_of, split_by_id
from data_gen.prompts.templates import TEMPLATES, encode, line_of_prompt, render

RECORDS_PER_FILE = 10
_MAX_LINE = 1500
_PIECES = (
    *(" ", "\n", "\t", "\r\n", '"', "'", ",", ";", "|", "\\", "a b", "1e5", "null", "0007", "<|user|>", "</s>"),
    *("{{ x }}", "{% if %}", "[INST]", "日本語", "été", "e\u0301", "😀", "שלום", "\u200b", "\ufeff", "\xa0", "\u2028"),
    *("\x85", "\0", "\x07", "# h\n- *x*", "<b>&amp;</b>", "=1+1", "a" * 300),
)
_PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}<a>"
)
CHATS = {
    "plain loop": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}\n{% endfor %}<|assistant|>\n",
    "trimmed": "{% for m in messages %}{{ m['content'] | trim }}\n{% endfor %}",
    "list of parts": _PARTS,
    "parts or text": "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{{ m['content'][0]['text'] }}{% endif %}{% endfor %}",
    "no system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
    "ends with EOS": "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}",
    "dated": "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m['content'] }}{% endfor %}",
    "dated, computed": "{% set f = '%Y' %}{{ strftime_now(f) }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "last alone": "{{ messages[-1]['content'] }}",
    "no words": "{% for m in messages %}<{{ m['role'] }}>{% endfor %}",
    "cut": "{% for m in messages %}{{ m['content'][:3] }}{% endfor %}",
    "upper": "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
    "JSON": "{{ messages | tojson }}",
    "tools": "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "after thinking": "{% for m in messages %}{{ m['content'].split('</think>')[-1].lstrip('\\n') }}{% endfor %}",
    "adds a number": "{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}",
    "divides": "{{ 1 / (messages | length - 1) }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "too far": "{{ messages[3]['content'] }}",
    "unknown function": "{{ nothing() }}",
    "broken": "{% for m in messages %}{{ m['content'] }}",
    "default of another key": "{% for m in messages %}{{ m['text'] }}{% endfor %}",
}


@dataclass
class Case:
    """One record, and what is known of it."""

    record: Any
    mark: str
    is_well_formed: bool = True


@dataclass
class Fuzz:
    """What became of all records."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def run(num_records: int, seed: int, folder: Path, tokenizer_path: str) -> Fuzz:
    """Read and render so many records in files of ten."""
    fuzz = Fuzz()
    for number in range(-(-num_records // RECORDS_PER_FILE)):
        rng = Random(f"{seed}/{number}")
        tokenizer = _tokenizer(rng, tokenizer_path)
        # a letter in the middle: no JSON, CSV or spelling of a number changes the mark
        cases = [_case(rng, f"mk{number}q{index}") for index in range(RECORDS_PER_FILE)]
        form = rng.choice(list(_WRITERS))
        path = folder / f"{number}.{form}"
        try:
            _WRITERS[form](path, cases, rng)
        except (pa.ArrowException, UnicodeEncodeError, csv.Error):  # this format cannot hold such values
            path = folder / f"{number}.jsonl"
            _write_jsonl(path, cases, rng)
        _try_file(fuzz, path, cases, rng=rng, tokenizer=tokenizer)
    return fuzz


def _try_file(fuzz: Fuzz, path: Path, cases: list[Case], *, rng: Random, tokenizer: PreTrainedTokenizerBase) -> None:
    where = f"{path.name}: {cases[0].record!r:.300}"
    is_damaged = _damage(path, rng)
    # a tenth of the files is mapped by columns that only some records have
    columns = rng.choice([*[{}] * 18, {"prompt": "problem"}, {"id": "id"}])
    source = PromptSource(path=str(path), columns=columns)
    answer = _tried(fuzz, lambda: read(set_of(source)), f"reading {where}", str(path))
    if answer is None:
        fuzz.outcomes[f"in a file refused ({'damaged' if is_damaged else 'more than half unreadable'})"] += len(cases)
        return
    prompts, problems = answer
    fuzz.outcomes["record refused"] += len(problems)
    is_whole = not is_damaged and not source.columns and path.suffix != ".txt"
    for case in cases if is_whole else ():
        is_read = any(case.mark in "".join(prompt.turns) for prompt in prompts)
        if case.is_well_formed and not is_read:
            fuzz.faults.append(f"not read, {path.name}: {case.record!r:.300}; {list(problems.values())[:2]}")
    _tried(fuzz, lambda: split_by_id(prompts, weights=(2, 1, 1), seed=0), f"splitting {where}", "")
    for prompt in prompts:
        template = rng.choice(["chat", "chat", *TEMPLATES])
        own = [case for case in cases if case.mark in prompt.turns[0]]
        _try_prompt(fuzz, prompt, tokenizer, template, cases=own)


def _try_prompt(
    fuzz: Fuzz, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template: str, *, cases: list[Case]
) -> None:
    if not prompt.is_text or not prompt.turns[0].strip():
        fuzz.outcomes["empty, or half a character: data skips it"] += 1
        return
    name = next((name for name, chat in CHATS.items() if chat == tokenizer.chat_template), "?")
    where = f"{template} ({name}) of {prompt!r:.300}"
    text = _tried(fuzz, lambda: render(prompt, tokenizer, template), f"rendering {where}", "")
    if text is None:
        fuzz.outcomes["rendering refused"] += 1
        return
    ids = _tried(fuzz, lambda: encode(prompt, tokenizer, template), f"encoding {where}", "")
    _tried(fuzz, lambda: line_of_prompt(prompt, tokenizer, template), f"showing {where}", "")
    if ids is None:
        return
    decoded = str(tokenizer.decode(ids))
    fuzz.outcomes["rendered"] += 1
    for case in cases:
        if case.mark not in text or case.mark not in decoded:
            fuzz.faults.append(f"lacks the user's words {case.mark}: {where} -> {text!r:.200}")
        if case.is_well_formed and "reply" in text:
            fuzz.faults.append(f"has a reply: {where} -> {text!r:.200}")
    if "{'type'" in text:
        fuzz.faults.append(f"is written as Python writes a list: {where} -> {text!r:.200}")
    if ids and tokenizer.decode(ids[-1:]) == tokenizer.eos_token and template != "chat":
        fuzz.faults.append(f"ends with EOS: {where}")


def _tried(fuzz: Fuzz, action: Callable[[], Any], what: str, name: str) -> Any:
    """What an action returns; None if it refuses in one line that has the name."""
    try:
        return action()
    except (ValueError, OSError) as error:
        line = str(error)
        if isinstance(error, UnicodeError | json.JSONDecodeError) or not 0 < len(" ".join(line.split())) <= _MAX_LINE:
            fuzz.faults.append(f"{what}: no refusal for users: {type(error).__name__}: {line[:300]}")
        elif name not in line:
            fuzz.faults.append(f"{what}: the refusal does not name {name}: {line[:300]}")
    except Exception as error:  # a traceback for a user
        fuzz.faults.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return None


def _tokenizer(rng: Random, path: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = rng.choice([*CHATS.values(), tokenizer.chat_template])
    if rng.random() < 0.3:
        eos = (str(tokenizer.eos_token), int(tokenizer.eos_token_id or 0))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    return tokenizer


def _text(rng: Random, mark: str) -> str:
    pieces = rng.choices(_PIECES, k=rng.randint(0, 5))
    pieces.insert(rng.randint(0, len(pieces)), mark)
    if rng.random() < 0.02:
        pieces.append("\ud83d")
    return "".join(pieces)


def _case(rng: Random, mark: str) -> Case:
    """A well-formed record of a random form; some are then damaged."""
    user = _text(rng, mark)
    reply = _text(rng, "reply")
    content: Any = user if rng.random() < 0.7 else [{"type": "text", "text": user}]
    asks = {"role": rng.choice(["user", "human", "User"]), "content": content}
    answers = {"role": rng.choice(["assistant", "gpt", "model"]), "content": reply}
    system = [{"role": rng.choice(["system", "developer"]), "content": "Be brief."}]
    messages = [*system[: rng.randint(0, 1)], asks, answers, *rng.choice([[], [asks, answers]])]
    spoken = [{"from": "human", "value": user}, {"from": "gpt", "value": reply}]
    form = rng.choice(
        [
            {"messages": messages},
            {"conversations": spoken},
            {"prompt": messages[:-1] if messages[-1] is answers else messages, "chosen": reply, "rejected": reply},
            {"turns": [user, "and then?"]},
            {"instruction": user, "input": rng.choice(["", "some context"]), "output": reply},
            {"question": user, "answer": reply, "history": rng.choice([[], [[mark, reply]]])},
            {"prompt": user, "response": reply},
            {"text": user},
            {"text": f"{user}\n{reply}", "prompt": user, "completion": reply},
            {"question": user, "system": "Be brief.", "tools": rng.choice([None, "[]", [{"name": "f"}]])},
        ]
    )
    extras = [{}, {"id": mark}, {"idx": 7.5, "id": mark}, {"category": "c"}, {"notes": "n"}, {"problem": user}]
    record: Any = dict(form) | rng.choice(extras)
    if rng.random() < 0.75:
        return Case(record, mark)
    return Case(_damaged(record, rng), mark, is_well_formed=False)


def _damaged(record: dict[str, Any], rng: Random) -> Any:
    wrong: list[Any] = [None, 0, 1.5, True, "", " ", "\0", [], {}, [None], [[]], {"a": [1]}, 10**30, float("nan")]
    if rng.random() < 0.1:
        return rng.choice([*wrong, [record]])
    key = rng.choice(list(record))
    value = record[key]
    how = rng.randint(0, 3)
    if how == 0:
        return {name: entry for name, entry in record.items() if name != key}
    if how == 1 and isinstance(value, list) and value:
        at = rng.randrange(len(value))
        entry = value[at]
        if isinstance(entry, dict) and entry:
            entry = entry | {rng.choice(list(entry)): rng.choice(wrong)}
        return record | {key: [*value[:at], rng.choice([entry, *wrong]), *value[at + 1 :]]}
    if how == 2:
        return {f"{name} " if name == key else name: entry for name, entry in record.items()}
    return record | {key: rng.choice(wrong)}


def _write_lines(path: Path, lines: list[str], rng: Random) -> None:
    end = rng.choice(["\n", "\n", "\r\n"])
    text = end.join(lines) + rng.choice([end, "", end * 2])
    content = text.encode(rng.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig"]), errors="surrogatepass")
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)


def _write_jsonl(path: Path, cases: list[Case], rng: Random) -> None:
    escapes = rng.random() < 0.5
    lines = []
    for case in cases:
        line = json.dumps(case.record, ensure_ascii=escapes)
        if "\\ud83d" not in json.dumps(case.record) or "\ud83d" not in line:
            lines.append(line)
        else:  # half a character is written as an escape
            lines.append(json.dumps(case.record))
    _write_lines(path, lines, rng)


def _write_json(path: Path, cases: list[Case], rng: Random) -> None:
    _write_lines(path, [json.dumps([case.record for case in cases], indent=rng.choice([None, 1]))], rng)


def _write_table(path: Path, cases: list[Case], rng: Random, *, separator: str) -> None:
    for case in cases:  # all cells are text
        rows = case.record if isinstance(case.record, dict) else {}
        kept = {name: value.replace("\0", "") for name, value in rows.items() if isinstance(value, str)}
        case.record = kept
        words = [value for name, value in kept.items() if name in ("prompt", "instruction", "question", "text")]
        is_text = all("\0" not in value and "\ud83d" not in value for value in kept.values())
        # a lone carriage return, which the writer does not quote, would end the row
        case.is_well_formed &= bool(words) and case.mark in words[0] and is_text
    names = list(dict.fromkeys(name for case in cases for name in case.record))
    with path.open("w", encoding="utf-8", newline="", errors="surrogatepass") as file:
        writer = csv.DictWriter(file, names, delimiter=separator, lineterminator=rng.choice(["\n", "\r\n"]))
        writer.writeheader()
        writer.writerows(case.record for case in cases)


def _write_parquet(path: Path, cases: list[Case], rng: Random) -> None:
    records = [case.record if isinstance(case.record, dict) else {} for case in cases]
    columns = {}
    for name in dict.fromkeys(name for record in records for name in record):
        try:
            columns[name] = pa.array([record.get(name) for record in records])
        except (pa.ArrowException, UnicodeEncodeError, OverflowError):  # values of several types
            for case in cases:
                case.is_well_formed = False
    pq.write_table(pa.table(columns), path)


def _write_txt(path: Path, cases: list[Case], rng: Random) -> None:
    _write_lines(path, [" ".join(_text(rng, case.mark).split()) for case in cases], rng)


_WRITERS: dict[str, Callable[[Path, list[Case], Random], None]] = {
    "jsonl": _write_jsonl,
    "jsonl.gz": _write_jsonl,
    "json": _write_json,
    "csv": lambda path, cases, rng: _write_table(path, cases, rng, separator=rng.choice([",", ";"])),
    "tsv": lambda path, cases, rng: _write_table(path, cases, rng, separator="\t"),
    "parquet": _write_parquet,
    "txt": _write_txt,
}


def _damage(path: Path, rng: Random) -> bool:
    """Damage one file in eight: other encodings, a cut, a changed byte, nothing in it."""
    if rng.random() > 0.125:
        return False
    content = path.read_bytes()
    at = rng.randrange(max(1, len(content)))
    text = content.decode("utf-8", errors="replace")
    changed = [content[:at], content[:at] + b"\xff" + content[at + 1 :], b"", b"\n\n", content + content[:at]]
    changed += [text.encode("utf-16"), text.encode("latin-1", errors="replace"), text.encode("utf-32-le")]
    path.write_bytes(rng.choice(changed))
    return True


def main() -> None:
    num, seed = (int(number) for number in [*sys.argv[1:], *("2000", "0")[len(sys.argv) - 1 :]])
    tokenizer_path = str(Path(__file__).parents[2] / "checkpoints" / "tiny" / "target")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"  # before `datasets` is imported
        fuzz = run(num, seed, Path(folder), tokenizer_path)
    print(", ".join(f"{count:,} {outcome}" for outcome, count in fuzz.outcomes.most_common()))
    for fault in fuzz.faults:
        print(f"FAULT {fault.encode(errors='backslashreplace').decode()}")
    print(f"{len(fuzz.faults)} faults in {num:,} records")
    raise SystemExit(bool(fuzz.faults))


if __name__ == "__main__":
    main()
