"""Drafts that others published, read into Leadout's networks: the way back from `models/export/`.

One file per family. Each has `recognises(folder)`, which looks at config.json and the names of tensors, and
`read(folder, target, choices)`, which gives the fields of the network's shape, its tensors under Leadout's
names, and notes: how everything was read that a file does not say. `network.py` has what families share, and
builds the network, which refuses what is missing, unknown or of another size. `python -m models.imports`
writes a draft of ours from it, where `imports.*` can decide otherwise than the rules.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from configs.errors import CheckpointError
from configs.schema import ImportsConfig
from models.checkpoint import CONFIG
from models.imports import dflash, eagle1, eagle3, medusa, mlp_speculator, peagle, small
from models.imports.folder import Published
from models.imports.network import build
from models.target import Target

log = logging.getLogger(__name__)

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, StrictDataclassError)

# Asked in this order: the first that knows the folder reads it.
FAMILIES: tuple[ModuleType, ...] = (peagle, dflash, eagle3, eagle1, medusa, mlp_speculator, small)


def load_published(folder: Path, target: Target) -> Any:
    """The network of the published draft in `folder`, float32, on the target's device; how it was read is
    printed. Raises `CheckpointError` for one of no known family, for another target, or damaged."""
    network, notes = read_published(folder, target, ImportsConfig())
    told = "".join(f"; {note}" for note in notes)
    # A warning, so that it is seen where no logging was set up.
    log.warning("%s is read as %s%s.", folder, network.method, told)
    return network


def read_published(folder: Path, target: Target, choices: ImportsConfig) -> tuple[Any, list[str]]:
    """(the network as `load_published` gives it, how the files were read)."""
    published = Published(folder)
    family = family_of(published)
    try:
        draft = family.read(published, target, choices)
        return build(draft, published, target), draft.notes
    except UNREADABLE as error:  # whatever a stranger's files may hold in a field's place
        name = family.__name__.rpartition(".")[2]
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{folder} is no whole draft of {name}: a field of {CONFIG} is absent or of the wrong kind, or a "
            f"tensor has another shape ({type(error).__name__}: {said}). Fetch it again, or mend {CONFIG}."
        ) from error


def family_of(published: Published) -> ModuleType:
    for family in FAMILIES:
        if family.recognises(published):
            return family
    kind = published.speculators or published.config.get("model_type") or "no model_type"
    shown = ", ".join(sorted(published.names)[:4])
    known = ", ".join(family.__name__.rpartition(".")[2] for family in FAMILIES)
    raise CheckpointError(
        f"{published.folder} holds no draft that Leadout knows ({CONFIG}: {kind}; tensors: {shown}, ...). "
        f"Known are drafts of {known}, as their authors, speculators, vLLM and SGLang write them."
    )
