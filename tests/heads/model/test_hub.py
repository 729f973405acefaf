"""Heads go to the hub and come back, through huggingface_hub's own requests to a server of this test; offline is one
clear line.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from heads import AcceptanceHead, Provenance
from heads.command import inspect, push, save_whole

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The few requests of create_repo, upload_folder and snapshot_download."""

    repos: dict[str, dict[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            name = "{organization}/{name}".format(**json.loads(body))
            self.repos.setdefault(name, {})
            self.answer({"url": f"{constants.ENDPOINT}/{name}"})
        elif "/preupload/" in self.path:
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": file["path"]} | modes for file in json.loads(body)["files"]]})
        elif "/commit/" in self.path:
            files = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
            self.repos[self.repo] |= {file["path"]: base64.b64decode(file["content"]) for file in files}
            self.answer({"commitUrl": f"{constants.ENDPOINT}/{self.repo}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        if self.repo not in self.repos:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        files = self.repos[self.repo]
        if "/resolve/" in self.path:
            content = files[self.path.rsplit("/", 1)[1]]
            self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', **{"X-Repo-Commit": COMMIT})
        elif "/tree/" in self.path:
            self.answer([{"type": "file", "path": name, "size": len(files[name]), "oid": "0"} for name in files])
        else:
            self.answer({"id": self.repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})

    do_HEAD = do_GET  # noqa: N815

    @property
    def repo(self) -> str:
        return "/".join(self.path.removeprefix("/api/models").strip("/").split("/")[:2])

    def answer(self, content: object, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def repos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, bytes]]]:
    """What the hub holds: name -> files."""
    handler = type("OneHub", (Hub,), {"repos": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield handler.repos
    server.shutdown()
    server.server_close()


def test_a_head_goes_to_the_hub_with_its_card_and_comes_back(tmp_path: Path, repos):
    path = save_whole(AcceptanceHead(6, 2, provenance=Provenance(reject_weight=6.0)), tmp_path / "fed-d2-w6")
    assert push(path=str(path), repo="someone/fed-d2-w6") == f"{constants.ENDPOINT}/someone/fed-d2-w6"
    assert repos == {"someone/fed-d2-w6": {file.name: file.read_bytes() for file in path.iterdir()}}
    assert b"Acceptance-prediction head" in repos["someone/fed-d2-w6"]["README.md"]
    ours, theirs = AcceptanceHead.from_pretrained(path), AcceptanceHead.from_pretrained("someone/fed-d2-w6")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert inspect(path="someone/fed-d2-w6")["reject_weight"] == 6.0


def test_what_the_hub_does_not_give_or_take_is_one_line(tmp_path: Path, repos, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(FileNotFoundError, match=r"no head at 'no/such': .* `hf auth login`"):
        AcceptanceHead.from_pretrained("no/such")
    path = save_whole(AcceptanceHead(6, 1), tmp_path / "head")
    with pytest.raises(ValueError, match=r"cannot upload .* pass --repo as owner/name"):
        push(path=str(path), repo="two words")
    (path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="not a complete safetensors"):
        push(path=str(path), repo="someone/broken")
    assert repos == {}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no head at 'someone/else'"):
        AcceptanceHead.from_pretrained("someone/else")
