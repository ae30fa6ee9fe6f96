"""The conditions that go with every number."""

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from models.provenance import git, provenance


def commit(folder: Path) -> str:
    """Makes `folder` a repository with one commit of one file and returns the commit."""
    run = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (folder / "a").write_text("1")
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "first"]):
        subprocess.run([*run, *words], check=True)
    return subprocess.run(
        [*run, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_provenance_is_json_and_names_what_matters() -> None:
    found = json.loads(json.dumps(provenance()))
    assert set(found) == {"git", "hardware", "versions", "load_average"}
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["llguidance"] == version("llguidance")  # grammars
    assert found["hardware"]["threads"] == torch.get_num_threads()
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["cpu"]


def test_git_names_commit_and_dirtiness(tmp_path: Path) -> None:
    head = commit(tmp_path)
    assert git(tmp_path.resolve()) == {"commit": head, "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git(tmp_path.resolve()) == {"commit": head, "dirty": True}


def test_git_ignores_a_checkout_that_only_surrounds_the_code(tmp_path: Path) -> None:
    commit(tmp_path)
    (tmp_path / "site-packages").mkdir()
    assert git((tmp_path / "site-packages").resolve()) is None
