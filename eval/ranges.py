"""Named ranges of a decode step, and whose methods they are.

A step is cut into `PARTS`, each the time spent in some methods and in none of another part that they call:
attention is the target's attention modules, `target.other` its forward without what has a name of its own. A
`Mark` says which method belongs to which part. `marked` puts something around all of them for as long as it
is open: a `Clock`, which counts wall time, or `recorded`, which names the ranges to torch's profiler.

Modules are known by the names that Hugging Face's models and our draft networks give them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

from torch import nn
from torch.profiler import record_function

from configs.errors import TargetError
from decoding.decoder import Batch
from decoding.drafters import Drafter
from decoding.drafters.forced import ForcedDrafter
from decoding.drafters.merged import MergedDrafter
from decoding.reader import NetworkDrafter, Reader
from models.target import Target

# What each part is, in the order in which they are shown.
PARTS = {
    "target.attention": "attention, its projections and the K/V written and read",
    "target.mlp": "MLP",
    "target.lm_head": "LM head",
    "target.other": "embedding, norms, residuals, rotary embedding",
    "draft.attention": "the draft's attention",
    "draft.mlp": "the draft's MLP",
    "draft.lm_head": "the draft's LM head",
    "draft.other": "the rest of the draft's forwards, their masks included",
    "draft.tree": "growing the tree: choosing or drawing tokens, lookups",
    "inputs": "the target's ids, positions and tree mask",
    "verify": "warp, sampling, acceptance",
    "commit": "accepted rows of the cache, outputs, what drafters will hear",
    "round": "the loop itself",
}
ROOT = "round"  # the range of a whole step, in which all others lie

ATTENTION = {"self_attn", "attn", "attention", "self_attention"}
MLP = {"mlp", "feed_forward", "ffn", "moe", "block_sparse_moe", "fc1", "fc2", "blocks"}  # blocks: Medusa's
HEAD = {"lm_head", "lm_heads", "head"}

Method = Callable[..., Any]
Wrap = Callable[[Method, str], Method]  # (a method, its part) -> what to call in its place


class Mark(NamedTuple):
    owner: Any
    method: str
    part: str


def marks_of(batch: Batch, target: Target, draft: Any = None) -> list[Mark]:
    """Every method of a round that has a part. draft: a network, or a small language model; None: there is
    none.

    Raises `TargetError` for a target whose layers have no attention and MLP by a known name.
    """
    drafting = any(decoding.params.draft_tokens for decoding in batch.live)
    steps = {
        "step": ROOT,
        "propose": "draft.tree" if drafting else ROOT,  # plain decoding proposes nothing
        "rows": "inputs",
        "forward": "target.other",
        "verify_all": "verify",
        "commit": "commit",
    }
    marks = [Mark(batch, method, part) for method, part in steps.items()]
    layers = module_marks(target.layers, "target")
    if lacking := {"target.attention", "target.mlp"} - {mark.part for mark in layers}:
        named = ", ".join(name for name, _ in target.layers[0].named_children())
        raise TargetError(
            f"The layers of target {target.name} consist of {named}, and none of these is known as "
            f"{' or '.join(sorted(part.removeprefix('target.') for part in lacking))}. Add its name in "
            "eval/ranges.py."
        )
    marks += [*layers, Mark(target.head, "forward", "target.lm_head")]
    for reader in readers(batch.drafter):
        marks += [Mark(reader, method, "draft.other") for method in ("read", "extend")]
        marks.append(Mark(reader, "logits", "draft.lm_head"))
    if drafting and draft is not None:
        marks += module_marks(draft.model if isinstance(draft, Target) else draft, "draft")
    return marks


def module_marks(root: nn.Module, whose: str) -> list[Mark]:
    """The attention, MLP and head modules below `root`."""
    kinds = {"attention": ATTENTION, "mlp": MLP, "lm_head": HEAD}
    found = []
    for path, module in root.named_modules():
        name = next((word for word in reversed(path.split(".")) if not word.isdigit()), "")
        part = next((part for part, names in kinds.items() if name in names), None)
        if part is not None and not isinstance(module, nn.ModuleList):
            found.append(Mark(module, "forward", f"{whose}.{part}"))
    return found


def readers(drafter: Drafter) -> Iterator[Reader]:
    """The draft networks' readers in `drafter`; none for lookups."""
    match drafter:
        case ForcedDrafter():
            yield from readers(drafter.inner)
        case MergedDrafter():
            for each in drafter.drafters:
                yield from readers(each)
        case NetworkDrafter():
            yield drafter.reader


@contextmanager
def marked(marks: Sequence[Mark], wrap: Wrap) -> Iterator[None]:
    """Within, every marked method is called through `wrap`."""
    own = [(mark, vars(mark.owner).get(mark.method)) for mark in marks]
    try:
        for mark in marks:
            setattr(mark.owner, mark.method, wrap(getattr(mark.owner, mark.method), mark.part))
        yield
    finally:
        for mark, before in own:
            if before is not None:  # an instance's own, as packing gives linear layers
                setattr(mark.owner, mark.method, before)
            else:
                vars(mark.owner).pop(mark.method, None)


class Clock:
    """Wall seconds by part: at every instant of the part that was entered last and not left."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.entered: list[str] = []
        self.since = 0.0

    def wrap(self, method: Method, part: str) -> Method:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            if self.entered:
                self.seconds[self.entered[-1]] += began - self.since
            self.entered.append(part)
            self.since = began
            try:
                return method(*args, **kwargs)
            finally:
                ended = perf_counter()
                self.seconds[self.entered.pop()] += ended - self.since
                self.since = ended

        return timed


def recorded(method: Method, part: str) -> Method:
    """`method`, each call of which torch's profiler sees as a range named `part`."""

    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(part):
            return method(*args, **kwargs)

    return named
