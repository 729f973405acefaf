"""Every keyed store misses when anything changes that its values depend on, and hits when nothing does."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from configs.command import config_of, parser_for
from decode.experiment import Experiment
from decode.policies import HeadPolicy
from evaluation import keys
from evaluation.batches.curves import curves_store
from evaluation.bench import race
from evaluation.bench.command import bench
from evaluation.bench.race import Race, RaceTerms
from evaluation.costs.machine import kept_costs, key_of, loop_key
from evaluation.flag_types import RaceRules
from evaluation.hierarchies import decoded
from heads import AcceptanceHead
from heads.model.provenance import Provenance
from store.json_files import KeyedStore

ROOT = Path(__file__, "../../..").resolve()
TERMS = RaceTerms(2, 4, (), (), (), RaceRules())
NAMED = replace(TERMS, policies=("fixed_length:k=2", "head:{head},max_rejection_prob=0.4"))


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
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shutil.copytree("checkpoints/tiny/draft", tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {number}."}) + "\n" for number in range(60)))
    flags = {"decode.dir": tmp_path / "decode", "heads.dir": tmp_path / "heads", "data.prompts": prompts}
    flags |= {"data.num_train": 40, "data.num_dev": 10, "data.num_test": 10, "decode.allow_foreign_heads": "true"}
    flags |= {"pair.draft.path": tmp_path / "draft", "decode.t_draft_s": 0.001, "decode.t_target_s": 0.005}
    flags |= {"decode.num_dev": 5, "decode.num_test": 2, "decode.max_new_tokens": 8, "decode.max_draft_length": 4}
    parser = parser_for(bench)
    spelt = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    made = config_of(parser, parser.parse_args(["--config", "configs/tiny.yaml", *spelt]))
    write_head(made)
    return made


def with_value(config, name, value):
    """The config with one setting changed: "decode.seed", 1."""
    first, _, rest = name.partition(".")
    return replace(config, **{first: with_value(getattr(config, first), rest, value) if rest else value})


def cell_of(config, terms, sampling="own"):
    """(the store of a race, the key of its cell)."""
    policies = tuple(spec.format(head=head_of(config)) for spec in terms.policies)
    made = Race(config, replace(terms, policies=policies))
    return KeyedStore(made.path, remedy=""), made.key("prompts", sampling)


def decoded_of(config):
    experiment = Experiment(config)
    policy = HeadPolicy(AcceptanceHead.from_pretrained(head_of(config)), max_rejection_prob=0.5)
    run = decoded.run_key(experiment, ("target", "draft"))
    key = {"prompt": "prompt", "arm": "sd with head", "setting": decoded.version_of(policy), "run": run}
    return KeyedStore(experiment.directory / "decoded.jsonl", remedy=""), key


STORES = {
    "bench": lambda config: cell_of(config, TERMS),
    "bench of named policies": lambda config: cell_of(config, NAMED),
    "costs": lambda config: (kept_costs(Experiment(config).directory), key_of(Experiment(config))),
    "batch costs": lambda config: (curves_store(Experiment(config)), loop_key(Experiment(config))),
    "decoded": decoded_of,
}
BENCH, EVERY = ("bench", "bench of named policies"), tuple(STORES)
TIMED = (*BENCH, "costs", "batch costs")
SETTINGS = [
    ("pair.num_threads", 2, EVERY),
    ("pair.draft.dtype", "bfloat16", EVERY),
    ("pair.draft.attn_implementation", "eager", EVERY),
    ("pair.sampling.temperature", 0.5, TIMED),
    ("decode.max_draft_length", 3, TIMED),
    ("decode.compile", "stop", (*BENCH, "costs")),
    ("decode.max_new_tokens", 9, ("bench", "costs")),
    ("decode.num_dev", 6, ("bench", "costs")),
    ("data.template", "plain", (*BENCH, "costs")),
    ("data.max_prompt_tokens", 99, (*BENCH, "costs")),
    ("decode.t_target_s", 0.006, BENCH),
    ("decode.stop_share", 0.5, BENCH),
    ("decode.seed", 1, ("bench",)),
    ("decode.draws_per_prompt", 2, ("bench",)),
    ("decode.policies", ("entropy",), ("bench",)),
    ("decode.grid", {"entropy": {"max_sqrt_entropy": [0.5]}}, ("bench",)),
    ("decode.num_test", 3, ()),
    ("decode.prompts_per_shard", 3, ()),
]


@pytest.mark.parametrize(("name", "value", "missing"), SETTINGS, ids=[name for name, *_ in SETTINGS])
def test_a_changed_setting_misses_in_every_store_that_depends_on_it(config, name, value, missing):
    changed = with_value(config, name, value)
    for kind, of_config in STORES.items():
        store, key = of_config(config)
        store.keep([(key, dict.fromkeys(store._fields, 0.0))])
        assert store.get(of_config(config)[1]) is not None, f"{kind}: unchanged, so that it hits"
        assert (store.get(of_config(changed)[1]) is None) == (kind in missing), kind


def other_weights(config, monkeypatch):
    path = Path(config.pair.draft.path, "model.safetensors")
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def another_machine(config, monkeypatch):
    monkeypatch.setattr(keys.platform, "processor", lambda: "another")


def another_version(config, monkeypatch):
    monkeypatch.setattr(keys, "version", lambda package: "0.0.0")


def other_code(config, monkeypatch):
    for module in (race, decoded):
        monkeypatch.setattr(module, "code_key", lambda: "another")


def other_prompts(config, monkeypatch):
    path = Path(config.data.prompts)
    path.write_text(path.read_text().replace("Count to", "Count up to"))


EVENTS = [
    (other_weights, EVERY),
    (another_machine, EVERY),
    (another_version, EVERY),
    (other_code, (*BENCH, "decoded")),
    (other_prompts, (*BENCH, "costs")),
    (lambda config, monkeypatch: write_head(config, bias=0.1), (*BENCH, "decoded")),
    (lambda config, monkeypatch: write_head(config, temperature=2.0), (*BENCH, "decoded")),
]
NAMES = ["draft weights", "machine", "versions", "code", "prompts", "head weights", "head calibration"]


@pytest.mark.parametrize(("change", "missing"), EVENTS, ids=NAMES)
def test_a_changed_file_misses_in_every_store_that_depends_on_it(config, change, missing, monkeypatch):
    before = {}
    for kind, of_config in STORES.items():
        store, before[kind] = of_config(config)
        store.keep([(before[kind], dict.fromkeys(store._fields, 0.0))])
    change(config, monkeypatch)
    for kind, of_config in STORES.items():
        store, key = of_config(config)
        assert (store.get(key) is None) == (kind in missing), kind


RULES = RaceRules(cycles=2), RaceRules(run=1), RaceRules(num_fixed=2), RaceRules(ignore_eos=False)
CHANGES = [{"num_prompts": 1}, {"num_tokens": 5}, {"families": ("entropy",)}, {"constants": (3,)}]
CHANGES += [{"policies": ("fixed_length:k=2",)}, *({"rules": rules} for rules in RULES)]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_every_term_of_a_race_makes_another_cell(config, changes):
    assert cell_of(config, TERMS)[1] != cell_of(config, replace(TERMS, **changes))[1]


def test_cells_of_two_samplings_and_two_policies_differ_and_datasets_share_them(config):
    assert cell_of(config, TERMS, "greedy")[1] != cell_of(config, TERMS, "sampled")[1]
    of_policies = with_value(config, "decode.policies", ("entropy",))
    one, other = (replace(TERMS, policies=("fixed_length:k=2", spec)) for spec in ("entropy", "max_prob"))
    assert cell_of(of_policies, one)[1] != cell_of(of_policies, other)[1]
    assert cell_of(config, replace(TERMS, rules=RaceRules(datasets=("prompts",))))[1] == cell_of(config, TERMS)[1]


def test_a_custom_policy_whose_file_changes_is_another_one(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "keyed_policy.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom decode.policies import Policy\n"
        "@dataclass(frozen=True)\nclass Unsure(Policy):\n    pass\n"
    )
    named = replace(TERMS, policies=("fixed_length:k=2", "keyed_policy:Unsure"))
    before = cell_of(config, named)[1]
    path.write_text(path.read_text() + "# changed\n")
    assert cell_of(config, named)[1] != before


def test_keys_agree_with_those_from_before_extra_layers_was_removed(config):
    assert keys.models_key(Experiment(config), "draft")["draft"]["extra_layers"] == 0
