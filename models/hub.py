"""Drafts on the Hugging Face hub: fetched to be measured, and pushed once exported.

Only safetensors are pushed, and they are fetched where a draft has them. Offline, what was fetched before is
found in the hub's cache. A fetched draft is linked into `runs/hub/`, where it looks like a run: what is
measured and exported from it lands beside it, and never in the cache.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx2  # what the hub's client meets on its way
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, RevisionResolutionError

from configs.errors import CheckpointError, StorageError
from models.files import storage
from models.target import first_line

NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
# Configuration and tokenizer; never code.
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")
PICKLES = ("pytorch_model*.bin", "medusa_lm_head.pt")
FAILURES = (httpx2.HTTPError, HFValidationError, RevisionResolutionError, OSError)
PUSHED = (*BESIDE, "*.safetensors", "*.md")


def is_hub_name(value: str) -> bool:
    """org/name or org/name@revision, unless org is a folder here: then it is the path of something absent."""
    match = NAME.fullmatch(value)
    return match is not None and not Path(value.split("/")[0]).is_dir()


def linked(value: str, runs: Path) -> Path:
    """The draft's folder for the hub name `value`, a link below `runs` to the hub's cache.

    Raises `CheckpointError` if it cannot be had.
    """
    folder = fetch(value)
    if runs == Path():  # of callers that keep no runs
        return folder
    link = runs / "hub" / slug(value) / "draft"
    with storage(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or link.resolve() != folder.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(folder.resolve(), target_is_directory=True)
    return link


def slug(value: str) -> str:
    """A folder's name for a hub name or a folder."""
    return value.replace("/", "--") if NAME.fullmatch(value) else Path(value).resolve().name


def fetch(value: str) -> Path:
    """The snapshot of a draft's repository in the hub's cache: safetensors, or pickles where there are none.

    Raises `CheckpointError`.
    """
    match = NAME.fullmatch(value)
    assert match is not None
    repo, revision = match["repo"], match["revision"]
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[*BESIDE, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[*BESIDE, *PICKLES]))
    except FAILURES as error:
        raise CheckpointError(
            f"There is no folder {value}, and the draft {repo} cannot be had from the hub: "
            f"{first_line(error)} Check the name and the connection (HF_HUB_OFFLINE must not be 1), accept "
            "its terms on its page and run hf auth login if it is gated, or name a folder that holds it."
        ) from error
    return folder


def push(folders: list[Path], name: str) -> str:
    """Uploads an exported folder to the hub's repository `name`, which is made if it is not there; its
    address.

    Raises `CheckpointError` for several folders or pickles, `StorageError` if the hub does not take it.
    """
    if len(folders) != 1:
        raise CheckpointError(
            f"export.push={name} names one repository, and {len(folders)} engines are exported, whose files "
            "go by the same names. Set export.engines to one of them."
        )
    folder = folders[0]
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds no safetensors, and nothing else is pushed: whoever loads a pickle runs what is "
            "in it. Export for an engine that reads safetensors."
        )
    hub = HfApi()
    try:
        hub.create_repo(name, exist_ok=True)
        done = hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=list(PUSHED),
            commit_message="Draft for speculative decoding",
        )
    except FAILURES as error:
        raise StorageError(
            f"export.push={name}: the hub did not take {folder}: {first_line(error)} Log in with hf auth "
            "login and a token that may write there. The folder is kept; run the same command again."
        ) from error
    return done.commit_url
