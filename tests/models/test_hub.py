"""Drafts pushed to and fetched from a hub: a local server that speaks as much of its protocol as it takes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console

from configs.errors import CheckpointError, ConfigError, StorageError
from configs.schema import Config, DataConfig, DecodeConfig, Dtype, EvalConfig, MethodConfig, TargetConfig
from eval.measure import measure
from models import find_draft, load_draft
from models.export.eagle3 import vllm
from models.export.layout import write_export
from models.files import write_text
from models.hub import is_hub_name, push, slug
from models.imports.__main__ import convert
from tests.conftest import tiny_draft, tiny_target

NAME = "org/tiny-eagle3"
COMMIT = "0123456789abcdef" * 2 + "01234567"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a dict of files, with one commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.taken: list[str] = []  # files that were fetched
        self.readonly = False


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self.describe("/".join(parts[2:4]), "tree" in parts[4:5])
        repository = self.server.repositories.get("/".join(parts[:2]), {})
        name = "/".join(parts[4:])
        if name not in repository:
            return self.answer(404, {}, code="EntryNotFound")
        if self.command == "GET":
            self.server.taken.append(name)
        self.send(200, repository[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{blob(repository[name])}"'})

    do_HEAD = do_GET

    def describe(self, name: str, tree: bool) -> None:
        if name not in self.server.repositories:
            return self.answer(404, {}, code="RepoNotFound")
        files = self.server.repositories[name]
        if tree:
            rows = [{"type": "file", "path": f, "size": len(d), "oid": blob(d)} for f, d in files.items()]
            return self.answer(200, rows)
        self.answer(200, {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = urlsplit(self.path).path.strip("/").split("/")
        if self.server.readonly:
            return self.answer(403, {"error": "no right to write here"})
        if parts == ["api", "repos", "create"]:
            sent = json.loads(body)
            name = f"{sent['organization']}/{sent['name']}"
            self.server.repositories.setdefault(name, {})
            return self.answer(200, {"url": f"{self.address()}/{name}", "name": name})
        name = "/".join(parts[2:4])
        if parts[4] == "preupload":
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self.answer(200, {"files": [file | {"shouldIgnore": False} for file in files]})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.repositories[name][line["value"]["path"]] = content
        url = f"{self.address()}/{name}/commit/{COMMIT}"
        self.answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})

    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, status: int, value: Any, code: str | None = None) -> None:
        self.send(status, json.dumps(value).encode(), {} if code is None else {"X-Error-Code": code})

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    target = tiny_target()
    layout = vllm(tiny_draft(target), target)
    write_export(tmp_path / "export" / "vllm", layout, target.tokenizer, lambda _: None)
    return tmp_path / "export" / "vllm"


def test_what_is_pushed_can_be_fetched_and_loaded(hub: Hub, exported: Path, tmp_path: Path) -> None:
    (exported / "stray.py").write_text("print('never pushed')")
    assert push([exported], NAME).endswith(f"/{NAME}/commit/{COMMIT}")
    names = {file.name for file in exported.iterdir()} - {"stray.py"}
    assert set(hub.repositories[NAME]) == names

    folder = find_draft(NAME, tmp_path / "runs", "tiny")
    assert folder == tmp_path / "runs" / "hub" / "org--tiny-eagle3" / "draft"
    target = tiny_target()
    ours, theirs = tiny_draft(target).state_dict(), load_draft(folder, target).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # A second time nothing is fetched; without a connection it is found in the cache.
    hub.taken.clear()
    assert find_draft(f"{NAME}@main", tmp_path / "runs", "tiny").parent.name == "org--tiny-eagle3@main"
    assert find_draft(str(tmp_path / "runs" / "hub" / "org--tiny-eagle3"), tmp_path, "tiny") == folder
    assert hub.taken == []


def test_safetensors_are_preferred_and_pickles_taken_where_there_are_none(hub: Hub, tmp_path: Path) -> None:
    files = ["config.json", "model.safetensors", "pytorch_model.bin", "model.py", "optimizer.pt"]
    hub.repositories[NAME] = {name: name.encode() for name in files}
    find_draft(NAME, tmp_path, "tiny")
    assert sorted(hub.taken) == ["config.json", "model.safetensors"]
    hub.taken.clear()
    files.remove("model.safetensors")
    hub.repositories["org/pickled"] = {name: name.encode() for name in files}
    find_draft("org/pickled", tmp_path, "tiny")
    assert sorted(hub.taken) == ["config.json", "pytorch_model.bin"]


def test_offline_it_is_found_in_the_cache(
    hub: Hub, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push([exported], NAME)
    folder = find_draft(NAME, tmp_path / "runs", "tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_draft(NAME, tmp_path / "runs", "tiny") == folder
    with pytest.raises(CheckpointError, match="the draft org/other cannot be had from the hub"):
        find_draft("org/other", tmp_path / "runs", "tiny")


def test_what_the_hub_refuses(hub: Hub, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="There is no folder org/absent, and the draft org/absent cannot"
    ):
        find_draft("org/absent", tmp_path, "tiny")
    with pytest.raises(CheckpointError, match="names one repository, and 2 engines are exported"):
        push([exported, exported], NAME)
    hub.readonly = True
    with pytest.raises(StorageError, match=f"export.push={NAME}: the hub did not take"):
        push([exported], NAME)
    (exported / "model.safetensors").rename(exported / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="holds no safetensors, and nothing else is pushed"):
        push([exported], NAME)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """org/name is a path where there is a folder org."""
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
    assert is_hub_name("org/name@refs/pr/1")
    assert not any(map(is_hub_name, ["latest", "./org/name", "/org/name", "a/b/c", "~/name", "../name"]))
    (tmp_path / "runs").mkdir()
    assert not is_hub_name("runs/smollm2_cpu")
    assert slug("org/name@main") == "org--name@main"
    assert slug("drafts/../drafts/mine/") == "mine"


# The commands


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr("eval.measure.share_of_others", lambda: 0.0)
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    prompts = {"train": [20, 21], "heldout": [5, 6, 7]}
    for split, ids in prompts.items():
        row = {"id": split, "category": "maths", "prompt_ids": ids, "messages": []}
        write_text(tmp_path / "data" / f"{split}.jsonl", json.dumps(row) + "\n")
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
        decode=DecodeConfig(draft_tokens=2, max_new_tokens=6),
        eval=EvalConfig(max_prompts=1, warmup_prompts=0, bootstrap=20, max_load=1.0),
    )


def test_a_draft_on_the_hub_is_measured(hub: Hub, exported: Path, tmp_path: Path, config: Config) -> None:
    push([exported], NAME)
    config.eval.draft = NAME
    made = measure(config, Console(file=io.StringIO(), width=140))
    assert (made["draft"]["method"], made["draft"]["training"]) == ("eagle3", None)
    assert (tmp_path / "runs" / "hub" / "org--tiny-eagle3" / "measure" / "measure.json").is_file()


def test_a_published_draft_is_kept_as_one_of_ours(exported: Path, tmp_path: Path, config: Config) -> None:
    config.imports.draft, config.imports.taps = str(exported), [0, 1, 3]
    screen = io.StringIO()
    folder = convert(config, Console(file=screen))
    assert folder == tmp_path / "runs" / "imports" / "vllm" / "draft"
    assert "taps [0, 1, 3]: as asked for" in screen.getvalue()
    read = load_draft(folder, tiny_target())
    assert read.taps == (0, 1, 3)
    training = json.loads((folder / "config.json").read_text())["training"]
    assert training == {"imported": str(exported), "read": ["taps [0, 1, 3]: as asked for"]}
    config.imports.draft = str(folder)
    with pytest.raises(ConfigError, match="is a draft of Leadout's own already"):
        convert(config, Console(file=screen))
