"""A JSON file that was truncated or broken by hand is named, with its line and the remedy, by every reader."""

import json

import pytest

from data_gen.store.manifest import read_manifest
from store.json_files import read_json
from store.shards import is_whole, sidecar_path, verify_shard, write_shard

WHOLE = json.dumps({"rows": 1, "problems": [1, 2, 3]}, indent=1)


@pytest.mark.parametrize("cut", range(len(WHOLE)))
def test_every_truncation_is_refused_with_the_name_of_the_file_and_the_remedy(tmp_path, cut):
    path = tmp_path / "facts.json"
    path.write_text(WHOLE[:cut])
    with pytest.raises(ValueError, match=r"facts\.json.*; make it again$"):
        read_json(path, remedy="make it again")


def test_the_line_is_named_and_a_whole_file_is_read(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text('{\n"rows": 1,\n"problems": oops}')
    with pytest.raises(ValueError, match=r"facts\.json:3: invalid JSON \(Expecting value at column 13\)"):
        read_json(path, remedy="")
    path.write_text(WHOLE)
    assert read_json(path, remedy="") == json.loads(WHOLE)


@pytest.mark.parametrize(
    ("content", "why"), [(b"[1]", "got list"), (b"\xff\xfe\x00", "not UTF-8"), (b"{}", "missing key 'rows'")]
)
def test_what_is_no_object_of_the_keys_is_refused(tmp_path, content, why):
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{why}.*; make it again"):
        read_json(path, remedy="make it again", keys=("rows",))


@pytest.mark.parametrize("content", ['{"rows": 3', '{"rows": 3}', "[]"])
def test_a_broken_sidecar_is_named(tmp_path, content):
    shard = tmp_path / "dev-00000.parquet"
    write_shard(shard, b"rows")
    sidecar_path(shard).write_text(content)
    for read in (is_whole, verify_shard):
        with pytest.raises(ValueError, match=r"dev-00000\.parquet\.json.*run the same command again"):
            read(shard)


def test_a_broken_manifest_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text('{"rows"')
    with pytest.raises(ValueError, match=r"manifest\.json.*start over"):
        read_manifest(tmp_path)
