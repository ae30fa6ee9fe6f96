"""Native draft checkpoints: a folder with `config.json` and `model.safetensors`, whole or absent.

The configuration names the method, the resolved network, and fingerprints of the target and its tokenizer
(design.md, contracts). A draft is useless, and silently so, beside any other target: loading compares, and
refuses with the reason. Drafts that others wrote are read too, by models/imports.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from configs.errors import CheckpointError, ConfigError
from models.files import sha256_file, write_folder
from models.hub import is_hub_name, linked

if TYPE_CHECKING:
    from models.target import Target

FORMAT, SCHEMA = "leadout-draft", 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# Of published drafts, in the order of preference; training_args.bin and its kind are no weights.
WEIGHT_PATTERNS = ("model-*.safetensors", "*.safetensors", "pytorch_model*.bin", "medusa_lm_head.pt")
NATIVE = "leadout"  # where config.json is a plain model's own, what is ours stands under this key of it


def draft_class(method: str) -> Any:
    """The network class of a draft method, `Draft` of `models/<method>.py`, or a `ConfigError`."""
    try:
        return importlib.import_module(f"models.{method}").Draft
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != f"models.{method}":
            raise
        raise ConfigError(
            f"There is no draft method {method!r}: models/{method}.py must define Draft."
        ) from None


def save_draft(folder: Path, draft: Any, target: Target, training: dict[str, Any]) -> None:
    """Writes `draft` to `folder`, whole or not at all; an earlier one there is replaced.

    training: what is worth knowing about how it was made, for JSON. Raises `CheckpointError` for weights that
    hold a NaN, `StorageError` when the disk does not take it.
    """
    state = draft.state_dict()
    refuse_nan(state, "The draft to be saved")
    config = {
        "format": FORMAT,
        "schema": SCHEMA,
        "method": draft.method,
        "network": draft.shape.to_dict(),
        "target": identity(target),
        "taps": list(draft.taps),
        "draft_vocab_size": draft.shape.draft_vocab_size,
        "training": training,
    }

    write_folder(folder, lambda temporary: draft.write(temporary, config, target))


def load_draft(folder: Path | str, target: Target, dtype: torch.dtype | None = None) -> Any:
    """The network of the draft in `folder`, on the target's device, in `dtype` (None: the target's).

    A published draft in another's format is read by `models.imports`, which prints how.
    Raises `CheckpointError` for files that are missing, truncated or incomplete, and for a draft that was
    trained for another target or tokenizer.
    """
    folder = Path(folder)
    if is_published(folder):
        published = importlib.import_module("models.imports").load_published(folder, target)
        return published.to(dtype or target.dtype).eval().requires_grad_(False)
    config = read_config(folder)
    refuse_stranger(config, target, folder)
    try:
        draft = draft_class(config["method"]).from_config(config["network"], target)
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None
    state = draft.read(folder, config)
    refuse_misfit(state, draft.state_dict(), folder / WEIGHTS)
    refuse_nan(state, str(folder / WEIGHTS))
    draft.load_state_dict(state)
    return draft.to(dtype or target.dtype).eval().requires_grad_(False)


def identity(target: Target) -> dict[str, Any]:
    """What a checkpoint says about its target."""
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
    }


def read_config(folder: Path) -> dict[str, Any]:
    """The checked `config.json` of a native draft. Raises `CheckpointError`."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no draft: there is no {CONFIG}. Name the draft/ folder of a finished run."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy or save the draft again.") from error
    config = config.get(NATIVE, config) if isinstance(config, dict) else config
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} describes no native Leadout draft, which is needed here. Name the draft/ folder of a "
            "run, or make one of a published draft with python -m models.imports."
        )
    if config.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} has schema {config.get('schema')}, and this version of Leadout reads {SCHEMA}. Use the "
            "version that wrote it."
        )
    missing = [key for key in ("method", "network", "target") if key not in config]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}. Copy or save the draft again.")
    return config


def is_published(folder: Path) -> bool:
    """Whether `folder` holds a draft of another's format. What cannot be read is not: reading says why."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    foreign = isinstance(config, dict) and NATIVE not in config and "format" not in config
    return foreign and bool(weight_files(folder))


def training_of(folder: Path) -> dict[str, Any] | None:
    """What a draft's folder says about its training; None if others published it."""
    return None if is_published(folder) else read_config(folder).get("training")


def weight_files(folder: Path) -> list[Path]:
    """The files of a draft's weights, safetensors where there are any; none if it holds no draft."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    found = (sorted(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS)
    return next((files for files in found if files), [])


def draft_hash(folder: Path) -> str:
    """SHA-256 over the hashes of a draft's config.json and weights."""
    files = [sha256_file(file) for file in (folder / CONFIG, *weight_files(folder))]
    return hashlib.sha256(" ".join(files).encode()).hexdigest()


def refuse_stranger(config: dict[str, Any], target: Target, folder: Path) -> None:
    """Raises `CheckpointError` if the draft belongs to another target or tokenizer."""
    theirs, ours = config["target"], identity(target)
    for key, what in (("tokenizer_fingerprint", "tokenizer"), ("fingerprint", "target")):
        if theirs.get(key) != ours[key]:
            raise CheckpointError(
                f"The draft in {folder} was trained for another {what}: for {called(theirs)} ({what} "
                f"{short(theirs.get(key))}), while this target is {called(ours)} ({what} "
                f"{short(ours[key])}). Set target.name and target.revision to what the draft was trained "
                "for, or train a draft for this target."
            )


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises `CheckpointError`."""
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. Copy or save the draft again.") from None
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(
            f"{path} is truncated or damaged ({size} bytes: {error}). Copy the draft again from its run, or "
            "train it again."
        ) from error


def refuse_misfit(state: dict[str, Tensor], expected: dict[str, Tensor], path: Path) -> None:
    """Raises `CheckpointError` naming tensors that are missing, unknown, or of another shape."""
    faults = [f"{name} is missing" for name in expected if name not in state]
    faults += [f"{name} is unknown" for name in state if name not in expected]
    faults += [
        f"{name} is {list(state[name].shape)} and should be {list(weight.shape)}"
        for name, weight in expected.items()
        if name in state and state[name].shape != weight.shape
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(
            f"{path} does not fit its {CONFIG}: {'; '.join(faults[:3])}{more}. The two files belong to "
            "different drafts, or one was edited: copy both again from the run."
        )


def refuse_nan(state: dict[str, Tensor], what: str) -> None:
    """Raises `CheckpointError` for a NaN: such weights were never initialised, or training diverged."""
    names = [
        name for name, weight in state.items() if weight.is_floating_point() and bool(weight.isnan().any())
    ]
    if names:
        raise CheckpointError(
            f"{what} has NaN in {len(names)} tensors, the first being {names[0]}: they were never "
            "initialised, or training diverged. Use an earlier checkpoint, or train again with a lower "
            "trainer.lr."
        )


def find_draft(value: str, runs: Path, experiment: str) -> Path:
    """The draft folder that a configuration's `draft` means.

    value: a draft's folder, a run's folder (its `draft/`), an experiment's (its newest run that has a draft),
    `latest`: that of `experiment` below `runs`, or the hub's name of a published one, org/name or
    org/name@revision. Raises `CheckpointError` that says what is there instead.
    """
    if value == "latest":
        return latest_draft(runs / experiment)
    folder = Path(value).expanduser()
    for candidate in (folder, folder / "draft"):
        if is_draft(candidate):
            return candidate
    if not folder.is_dir():
        if is_hub_name(value):
            return linked(value, runs)
        raise CheckpointError(
            f"There is no folder {value}. Name a run's folder, a draft's folder, a draft on the hub "
            "(org/name), or latest."
        )
    if (folder / "checkpoints").is_dir():
        raise CheckpointError(f"The run {value} {unfinished(folder)}")
    if any(is_draft(run / "draft") or (run / "checkpoints").is_dir() for run in folder.glob("*")):
        return latest_draft(folder)
    lacking = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    raise CheckpointError(
        f"{value} is no draft: it lacks {' and '.join(lacking)}. Name a run's folder, a draft's folder, an "
        "experiment's, or latest."
    )


def latest_draft(folder: Path) -> Path:
    """The draft of the newest run in `folder` (runs are named by their time), or a `CheckpointError`."""
    found = sorted(
        (run for run in folder.glob("*") if run.is_dir() and not run.name.startswith(".")), reverse=True
    )
    for run in found:
        if is_draft(run / "draft"):
            return run / "draft"
    if found:
        raise CheckpointError(
            f"No run in {folder} has finished. The newest, {found[0].name}, {unfinished(found[0])}"
        )
    raise CheckpointError(
        f"There is no run in {folder} yet. Train a draft with python -m train.distill, or name a draft's "
        "folder."
    )


def unfinished(run: Path) -> str:
    """Why a run's folder has no draft, as the end of a sentence."""
    steps = len(list((run / "checkpoints").glob("step_*")))
    return (
        f"has no draft yet: it stopped with {steps} checkpoints. Run the same python -m train.distill again; "
        "it goes on where it stopped."
    )


def is_draft(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and bool(weight_files(folder))


def called(identity: dict[str, Any]) -> str:
    revision = identity.get("revision")
    return f"{identity.get('name')}@{revision}" if revision else str(identity.get("name"))


def short(fingerprint: str | None) -> str:
    return fingerprint[:12] if fingerprint else "without a fingerprint"
