"""A data directory as a dataset on the hub, or in a folder: rows, labels, the manifest and a card. Hidden states
follow from these, so they are left out.
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi

from configs.paths import local_path
from data_gen.store.manifest import Manifest
from data_gen.store.rows import account
from store.hub import HUB_ERRORS
from store.shards import atomic_directory, check_sums, shards_in

_FOLDERS = ("rows", "labels")
_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
"""Our name of a split -> its name in `datasets`."""
_CARD = """---
{license_line}tags:
- speculative-decoding
- acceptance-prediction
configs:
- config_name: default
  data_files:
{splits}
---

# Acceptance of {draft} by {target}

Responses of the target, and at each position a token of the draft with the probability that the target accepts it. One
row per response; `labels/` has the same numbers in float32 for training.

License: {license}.

| split | responses | tokens | prompts left out |
|---|---:|---:|---:|
{counts}

| model | name | revision | sha256 of the weights |
|---|---|---|---|
{models}

Sampling: {sampling}. Prompts: `{prompts}`. Settings: {settings}.

```python
from datasets import load_dataset

rows = load_dataset("{repo}", split="train")
```

Heads are trained on a copy of this repository; of the models, training needs the draft alone:

```bash
hf download {repo} --repo-type dataset --local-dir data/copy
acceptance-heads train --config experiment.yaml --data.dir data/copy
```
"""
_NO_LICENSE = "not stated by the target's model card; `acceptance-heads push --license` states one"


def publish(directory: Path, repo: str, *, manifest: Manifest, license: str | None, private: bool = False) -> str:
    """Check a data directory's sums and copy it to a dataset repository of the hub, or to a folder (`repo`
    begins with / or .); returns its address.

    Args:
        directory: data.dir.
        repo: owner/name, created if it does not exist; or a folder, which is replaced.
        manifest: that of the directory, without paths of this machine.
        license: identifier of its license, if known.
        private: create a new repository as private.

    Raises:
        ValueError: a shard is damaged, there are no rows, or the hub cannot be reached or refuses the upload.
    """
    paths = shards_in(directory, _FOLDERS)
    check_sums(paths)
    card = card_of(directory, manifest, repo=repo, license=license)
    if repo.startswith(("/", ".")):
        target = local_path(repo, "--repo")
        with atomic_directory(target) as folder:
            _copy(directory, folder, card, manifest)
        return str(target)
    with TemporaryDirectory() as name:
        folder = Path(name)
        _copy(directory, folder, card, manifest)
        api = HfApi()
        try:
            url = str(api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True))
            api.upload_folder(
                repo_id=repo, folder_path=folder, repo_type="dataset", commit_message=f"Upload data {directory.name}"
            )
        except HUB_ERRORS as error:
            cause = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{directory} was not uploaded to {repo} ({type(error).__name__}: {cause}); check the repository's "
                "name, the network and HF_ENDPOINT, and log in with `hf auth login` (a token that may write)"
            ) from error
    return url


def _copy(directory: Path, folder: Path, card: str, manifest: Manifest) -> None:
    for name in _FOLDERS:
        shutil.copytree(directory / name, folder / name, ignore=shutil.ignore_patterns(".*"))
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def card_of(directory: Path, manifest: Manifest, *, repo: str, license: str | None) -> str:
    """The dataset card: license, splits for `datasets.load_dataset`, models, sampling and counts. ValueError
    without rows.
    """
    counts = []
    splits = []
    for split, name in _SPLITS.items():
        paths = sorted(directory.glob(f"rows/{split}-*.parquet"))
        if paths:
            totals, _ = account(paths)
            counts.append(
                f"| {split} | {totals['ok']:,} | {totals['tokens']:,} | {totals['error'] + totals['skipped']:,} |"
            )
            splits.append(f"  - split: {name}\n    path: rows/{split}-*.parquet")
    if not counts:
        raise ValueError(f"{directory} has no rows to publish; run `acceptance-heads data` first")
    settings = ("template", "max_new_tokens", "mixing_ratio", "draft_length", "seed")
    return _CARD.format(
        license_line="" if license is None else f"license: {license}\n",
        splits="\n".join(splits),
        draft=manifest["draft"]["name"],
        target=manifest["target"]["name"],
        license=license or _NO_LICENSE,
        counts="\n".join(counts),
        models="\n".join(_line_of(role, manifest[role]) for role in ("target", "draft")),
        sampling=_listed(manifest["sampling"]),
        prompts=json.dumps(manifest.get("prompts")),
        settings=_listed({name: manifest.get(name) for name in settings}),
        repo=repo,
    )


def _line_of(role: str, model: Manifest) -> str:
    weights = str(model.get("weights") or "")[:12]
    return f"| {role} | {model['name']} | {model.get('commit') or model.get('revision') or ''} | {weights} |"


def _listed(settings: Manifest) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
