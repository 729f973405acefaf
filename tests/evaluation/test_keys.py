"""Every keyed store misses when anything changes that its values depend on, and hits when nothing does."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from configs.flag_types import RaceRules
from decode.experiment import Experiment
from decode.policies import HeadPolicy
from evaluation import keys
from evaluation.bench.race import Race
from evaluation.costs.machine import curves_store, kept_costs, key_of, loop_key
from heads import AcceptanceHead
from heads.model.head import Provenance
from papers.hierarchies import decoded
from store.json_files import KeyedStore
from tests.evaluation.commands import config_with, spelt

TERMS = {"rules": RaceRules(), "num_prompts": 2, "num_tokens": 4}
NAMED = TERMS | {"policies": ("fixed_length:k=2", "head:{head},max_rejection_prob=0.4")}


def head_of(config):
    return Path(config.heads.dir, "exported", "linear")


def write_head(config, *, bias=0.0, temperature=1.0):
    sampling = {"temperature": 1.0, "top_k": None, "top_p": None}
    provenance = Provenance(sampling=sampling, calibration_temperature=temperature)
    head = AcceptanceHead(96, 0, "drawn", provenance=provenance)
    for parameter in head.parameters():
        parameter.data.fill_(bias)
    head.save_pretrained(head_of(config))


@pytest.fixture
def config(tmp_path):
    shutil.copytree("checkpoints/tiny/draft", tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {number}."}) + "\n" for number in range(60)))
    flags = {"decode.dir": tmp_path / "decode", "heads.dir": tmp_path / "heads", "data.prompts": prompts}
    flags |= {"data.num_train": 40, "data.num_dev": 10, "data.num_test": 10, "decode.allow_foreign_heads": "true"}
    flags |= {"pair.draft.path": tmp_path / "draft", "decode.t_draft_s": 0.001, "decode.t_target_s": 0.005}
    flags |= {"decode.num_dev": 5, "decode.num_test": 2, "decode.max_new_tokens": 8, "decode.max_draft_length": 4}
    made = config_with(["--config=configs/tiny.yaml", *spelt(flags)], "bench")
    write_head(made)
    return made


def with_value(config, name, value):
    """The config with one setting changed: "decode.seed", 1."""
    first, _, rest = name.partition(".")
    return replace(config, **{first: with_value(getattr(config, first), rest, value) if rest else value})


def cell_of(config, terms, sampling="own"):
    """(the store of a race, the key of its cell)."""
    policies = tuple(spec.format(head=head_of(config)) for spec in terms.get("policies", ()))
    made = Race(config, **terms | {"policies": policies})
    return KeyedStore(made.store.path, remedy=""), made.key("prompts", sampling)


def decoded_of(config):
    experiment = Experiment(config)
    policy = HeadPolicy(AcceptanceHead.from_pretrained(head_of(config)), max_rejection_prob=0.5)
    run = decoded.run_key(experiment, ("target", "draft"))
    key = {"prompt": "prompt", "arm": f"sd with head: {decoded.version_of(policy)}", "run": run}
    return KeyedStore(experiment.directory / "clocked.jsonl", remedy=""), key


STORES = {
    "bench": lambda config: cell_of(config, TERMS),
    "bench of named policies": lambda config: cell_of(config, NAMED),
    "costs": lambda config: (kept_costs(Experiment(config).directory), key_of(Experiment(config))),
    "batch costs": lambda config: (curves_store(Experiment(config)), loop_key(Experiment(config))),
    "decoded": decoded_of,
}


def setting(name, value):
    return lambda config, monkeypatch: with_value(config, name, value)


def other_weights(config, monkeypatch):
    path = Path(config.pair.draft.path, "model.safetensors")
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def other_code(config, monkeypatch):
    monkeypatch.setattr(keys, "code_key", lambda: "another")


def given_curve(config, monkeypatch):
    return with_value(with_value(config, "decode.t_target_s", None), "decode.t_target_ms", "1:5,2:6")


def other_processor(config, monkeypatch):
    path = Path(config.decode.dir, "cpuinfo")
    path.write_text("processor\t: 0\nmodel name\t: AMD EPYC 1\n\nprocessor\t: 1\nmodel name\t: AMD EPYC 1\n")
    monkeypatch.setattr(keys, "_CPU_INFO", path)


def other_prompts(config, monkeypatch):
    path = Path(config.data.prompts)
    path.write_text(path.read_text().replace("Count to", "Count up to"))


BENCH, EVERY = ("bench", "bench of named policies"), tuple(STORES)
TIMED = (*BENCH, "costs", "batch costs")
CHANGES = {
    "nothing": (lambda config, _: None, ()),
    "threads": (setting("pair.num_threads", 2), EVERY),
    "dtype": (setting("pair.draft.dtype", "bfloat16"), EVERY),
    "attention": (setting("pair.draft.attn_implementation", "eager"), EVERY),
    "temperature": (setting("pair.sampling.temperature", 0.5), TIMED),
    "draft length": (setting("decode.max_draft_length", 3), TIMED),
    "new tokens": (setting("decode.max_new_tokens", 9), ("bench", "costs")),
    "dev prompts": (setting("decode.num_dev", 6), ("bench",)),
    "template": (setting("data.template", "plain"), (*BENCH, "costs")),
    "prompt tokens": (setting("data.max_prompt_tokens", 99), (*BENCH, "costs")),
    "given times": (setting("decode.t_target_s", 0.006), BENCH),
    "given curve": (given_curve, BENCH),
    "stop share": (setting("decode.stop_share", 0.5), BENCH),
    "seed": (setting("decode.seed", 1), ("bench",)),
    "draws": (setting("decode.draws_per_prompt", 2), ("bench",)),
    "policies": (setting("decode.policies", ("entropy",)), ("bench",)),
    "grid": (setting("decode.grid", {"entropy": {"max_sqrt_entropy": [0.5]}}), ("bench",)),
    "test prompts": (setting("decode.num_test", 3), ()),
    "shards": (setting("decode.prompts_per_shard", 3), ()),
    "draft weights": (other_weights, EVERY),
    "processor": (other_processor, EVERY),
    "versions": (lambda _, patch: patch.setattr(keys, "version", lambda package: "0.0.0"), EVERY),
    "code": (other_code, EVERY),
    "prompts": (other_prompts, (*BENCH, "costs")),
    "head weights": (lambda config, _: write_head(config, bias=0.1), (*BENCH, "decoded")),
    "head calibration": (lambda config, _: write_head(config, temperature=2.0), (*BENCH, "decoded")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_misses_in_every_store_that_depends_on_it(config, what, monkeypatch):
    change, missing = CHANGES[what]
    for of_config in STORES.values():
        store, key = of_config(config)
        store.keep([(key, dict.fromkeys(store._fields, 0.0))])
    changed = change(config, monkeypatch) or config
    for kind, of_config in STORES.items():
        store, key = of_config(changed)
        assert (store.get(key) is None) == (kind in missing), kind


def test_every_term_of_a_race_makes_another_cell_and_datasets_share_them(config):
    rules = RaceRules(run=1), RaceRules(ignore_eos=False)
    changes = [{"num_prompts": 1}, {"num_tokens": 5}, {"families": ("entropy",)}, {"constants": (3,)}]
    changes += [{"policies": ("fixed_length:k=2",)}, *({"rules": rule} for rule in rules)]
    key = cell_of(config, TERMS)[1]
    for change in changes:
        assert cell_of(config, TERMS | change)[1] != key, change
    assert cell_of(config, TERMS, "greedy")[1] != cell_of(config, TERMS, "sampled")[1]
    of_policies = with_value(config, "decode.policies", ("entropy",))
    one, other = (TERMS | {"policies": ("fixed_length:k=2", spec)} for spec in ("entropy", "max_prob"))
    assert cell_of(of_policies, one)[1] != cell_of(of_policies, other)[1]
    assert cell_of(config, TERMS | {"rules": RaceRules(datasets=("prompts",))})[1] == key


def test_a_custom_policy_whose_file_changes_is_another_one(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "keyed_policy.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom decode.policies import Policy\n"
        "@dataclass(frozen=True)\nclass Unsure(Policy):\n    pass\n"
    )
    named = TERMS | {"policies": ("fixed_length:k=2", "keyed_policy:Unsure")}
    before = cell_of(config, named)[1]
    path.write_text(path.read_text() + "# changed\n")
    assert cell_of(config, named)[1] != before


def test_the_processor_has_its_model_name_on_every_system(tmp_path, monkeypatch):
    """Two processors of one architecture differ, which `platform.processor` cannot see on Linux."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(keys, "_CPU_INFO", path)
    monkeypatch.setattr(keys.platform, "machine", lambda: "arch")
    for text, name in (
        ("processor\t: 0\nmodel name\t: AMD EPYC 9R14\nflags\t: a b\n", "AMD EPYC 9R14 arch"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "0xd40 arch"),
        ("processor\t: 0\n", "arch"),
    ):
        path.write_text(text)
        assert keys.processor_name() == name
    path.unlink()
    monkeypatch.setattr(keys.platform, "processor", lambda: "Intel64 Family 6")
    monkeypatch.setattr(keys.sys, "platform", "win32")
    assert keys.processor_name() == "Intel64 Family 6 arch"


def test_an_edited_comment_keeps_what_was_measured_and_an_edited_statement_does_not():
    source = 'class A:\n    """Of one."""\n    size: int = 1\n    """In tokens."""\n'
    for edited, is_same in (
        ('# why\nclass A:\n    """Of another."""\n\n    size: int = 1\n    """In bytes."""\n', True),
        (source.replace("= 1", "= 2"), False),
        (source + "    name = 'In tokens.'\n", False),
    ):
        assert (keys.code_of(edited) == keys.code_of(source)) == is_same
