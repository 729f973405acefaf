"""A DSpark draft's confidence head as a prefix head, and a prefix head in its place: no other tensor of it differs."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from configs.schema import Config, DataConfig, ModelSource, PairConfig
from heads import AcceptanceHead, Provenance
from heads.command import import_
from heads.model.confidence import CARD, confidence_head_of, write_confidence_head
from lm import load_pair
from tests.toys.made_up import ROOT

TINY = ROOT / "checkpoints" / "tiny"
WIDTH = 160
PROJ = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def draft_in(directory: Path):
    sources = {"target": TINY / "target", "draft": directory}
    pair = PairConfig(**{name: ModelSource(path=str(path), dtype="float32") for name, path in sources.items()})
    return load_pair(pair).drafting


def random_head(**provenance) -> AcceptanceHead:
    torch.manual_seed(0)
    return AcceptanceHead(WIDTH, 0, "prefix", provenance=Provenance(**provenance))


@pytest.fixture
def source(tmp_path) -> Path:
    folder = Path(shutil.copytree(TINY / "dspark", tmp_path / "draft"))
    (folder / "notes.txt").write_text("somebody's own")
    return folder


def written(head: AcceptanceHead, source: Path, out: Path, name: str = "head") -> Path:
    return write_confidence_head(head, name, source=source, out=out)


@pytest.mark.parametrize("num_files", [1, 2])
def test_the_copy_differs_in_nothing_but_the_confidence_heads_numbers(num_files, source, tmp_path):
    tensors = sorted(load_file(source / "model.safetensors").items())
    (source / "model.safetensors").unlink()
    for number in range(num_files):
        part = dict(tensors[number::num_files])
        save_file(part, source / f"model-{number}.safetensors", metadata={"format": "pt"})
    out = written(random_head(), source, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()} | {CARD}
    for path in source.iterdir():
        old, new = path.read_bytes(), (out / path.name).read_bytes()
        if path.suffix != ".safetensors":
            assert old == new
            continue
        with safe_open(path, "pt") as before, safe_open(out / path.name, "pt") as after:
            assert before.metadata() == after.metadata()
            for name in before.keys():  # noqa: SIM118
                assert torch.equal(before.get_tensor(name), after.get_tensor(name)) == (name not in PROJ)


def test_the_written_head_predicts_the_calibrated_logit_and_the_drafts_own_comes_back_as_it_was(source, tmp_path):
    draft, hidden = draft_in(source), torch.randn(50, WIDTH)
    own = confidence_head_of(draft)
    torch.testing.assert_close(own(hidden), draft.confidence(hidden), atol=1e-6, rtol=1e-6)
    out = written(own, source, tmp_path / "own")
    torch.testing.assert_close(*(load_file(folder / "model.safetensors") for folder in (source, out)), rtol=0, atol=0)
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors")
    head = random_head(reject_weight=6.0, calibration_temperature=1.7)
    draft = draft_in(written(head, source, tmp_path / "out"))
    torch.testing.assert_close(draft.confidence(hidden), head.calibrated_logit(head(hidden)), atol=1e-5, rtol=1e-5)


def test_a_command_reads_it_as_a_head_of_the_experiments_sampling(tmp_path):
    sources = {name: ModelSource(path=str(TINY / name), dtype="float32") for name in ("target", "draft")}
    config = Config(pair=PairConfig(**sources), data=DataConfig(dir=str(tmp_path / "data")))
    path = import_(config, source=str(TINY / "dspark"), out=str(tmp_path / "head"))
    head, own = AcceptanceHead.from_pretrained(path), confidence_head_of(draft_in(TINY / "dspark"))
    assert torch.equal(head.out.weight, own.out.weight)
    assert (head.timing, head.provenance.mixing_ratio) == ("prefix", None)
    assert head.provenance.draft["path"] == "dspark"
    with pytest.raises(ValueError, match=r"does not record its reject weight; pass --reject_weight"):
        import_(config, source=str(TINY / "draft"), out=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"--reject_weight is 6\.0, .* trained without one; remove it"):
        import_(config, source=str(TINY / "dspark"), reject_weight=6.0, out=str(tmp_path / "other"))


def test_the_card_names_sampling_and_draft_and_only_an_export_is_overwritten(source, tmp_path):
    sampling = {"temperature": 0.7, "top_k": None, "top_p": 0.9}
    head = random_head(sampling=sampling, target={"path": "a-target"}, training={"prompts": "stories"})
    out = written(head, source, tmp_path / "out", "prefix-d0-w1")
    card = (out / CARD).read_text()
    for fact in ("temperature 0.7", "top_p 0.9", "`draft`", "`prefix-d0-w1`", "`a-target`", "prompts: stories"):
        assert fact in card
    assert (written(random_head(), out, tmp_path / "again") / CARD).read_text().count("# Confidence head of") == 1
    for draft in (source, TINY / "dspark"):
        with pytest.raises(ValueError, match="not an exported confidence head; name another directory"):
            written(random_head(), draft, source)
    assert (source / "notes.txt").exists()
    assert written(random_head(), source, out) == out


def test_a_head_that_its_format_cannot_express_is_refused(source, tmp_path):
    for shape, problem in (
        ((WIDTH, 2, "prefix"), r"is prefix-d2, but a confidence head is one linear layer; export a linear"),
        ((WIDTH, 0, "prefix", True), r"confidence head is one linear layer"),
        ((WIDTH, 0, "prefix", ["text_position"]), r"is prefix.text_position-d0, but .* without scalars"),
        ((WIDTH, 0, "drawn"), r"is drawn-d0, but a confidence head"),
        ((96, 0, "prefix"), r"width 96, but this draft's confidence head has 160; export a head that"),
        ((200, 0, "prefix"), r"width 200, but engines pass .* the first 160 numbers; train"),
    ):
        with pytest.raises(ValueError, match=problem):
            written(AcceptanceHead(*shape), source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_directory_without_a_confidence_head_is_refused(source, tmp_path):
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:100])
    for directory, message in (
        (TINY / "draft", r"has no tensor confidence_head.proj.weight.* set pair.draft to a DSpark draft"),
        (source, r"not a complete safetensors file .* fetch or export it again"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            written(random_head(), directory, tmp_path / "out")
    draft = draft_in(TINY / "dspark")
    draft.confidence_head = None
    with pytest.raises(ValueError, match="has no confidence head"):
        confidence_head_of(draft)
