"""P-EAGLE as `speculators` and vLLM write it: EAGLE-3's tensors, `mask_hidden` and the id of a mask token.

`mask_hidden` stands for the taps of a row that the target has not read yet. For its token stands one that
config.json names (`mask_token_id`; vLLM also reads `ptd_token_id` and `pard_token`), so what is learnt for it
is a row of the draft's embedding, where Leadout has a vector by itself.
"""

from __future__ import annotations

from configs.schema import ImportsConfig
from models.imports import eagle3
from models.imports.folder import Published
from models.imports.network import Draft, take_mask, without_derived
from models.target import Target

NAMES = ("mask_token_id", "ptd_token_id", "pard_token")  # as vLLM asks for them


def recognises(published: Published) -> bool:
    if published.speculators:
        return published.speculators == "peagle"
    return "mask_hidden" in published.names


def read(published: Published, target: Target, choices: ImportsConfig) -> Draft:
    notes: list[str] = []
    tensors = without_derived(published.tensors, notes)
    row = take_mask(tensors, published, NAMES, target, notes)
    draft = eagle3.from_tensors(published, tensors, target, choices, notes, "peagle")
    if "mask_hidden" in draft.state:
        draft.state["mask_hidden"] = draft.state["mask_hidden"].reshape(1, -1)
    draft.state["mask_embedding"] = row
    return draft
