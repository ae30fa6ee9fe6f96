"""Shapes of token trees: which ranks a tree has room for, whatever tokens will stand there.

A node is named by the ranks from the root down to it, as in Medusa (Cai et al. 2024): (0,) is the draft's
first choice after the pending token, (0, 2) the third choice after that one. The root is (), stands in every
shape, and is not listed. decoding/growth.py fills a shape with tokens, decoding/sequoia.py finds the best.

A shape's file says under which conditions it was made, because the best shape depends on all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from models.files import storage, write_json

SCHEMA = 1

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """Nodes are numbered breadth first, siblings by rank; node 0 is the root.

    Raises `ConfigError` for a node without its parent, a node listed twice, and what is no path of ranks.
    """

    paths: tuple[Ranks, ...]  # of nodes 1, 2, ...; given in any order

    def __post_init__(self) -> None:
        known: set[Ranks] = {()}
        for path in sorted(self.paths, key=len):
            if not path:
                raise ConfigError("A tree's shape lists the root, (): leave it out, it is always there.")
            if any(rank < 0 for rank in path):
                raise ConfigError(f"A tree's shape has the path {path}: ranks count from 0.")
            if path in known:
                raise ConfigError(f"A tree's shape lists {path} twice: list each node once.")
            if path[:-1] not in known:
                raise ConfigError(
                    f"A tree's shape has {path} but not its parent {path[:-1]}: add the parent."
                )
            known.add(path)
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """First choices only: (0,), (0, 0), ..., `length` of them."""
        return cls.of([1] * length)

    @classmethod
    def of(cls, branching: Sequence[int]) -> TreeShape:
        """Every node of depth d has branching[d] children: (3, 2, 1) has 3 + 6 + 6 nodes."""
        paths: list[Ranks] = []
        level: list[Ranks] = [()]
        for count in branching:
            level = [(*path, rank) for path in level for rank in range(count)]
            paths += level
        return cls(tuple(paths))

    def __len__(self) -> int:
        """Nodes, the root included."""
        return 1 + len(self.paths)

    @property
    def depth(self) -> int:
        return len(self.paths[-1]) if self.paths else 0

    @cached_property
    def ranks(self) -> list[int]:
        """Each node's rank among all that could follow its parent; the root's counts for nothing."""
        return [0, *(path[-1] for path in self.paths)]

    @cached_property
    def children(self) -> list[list[int]]:
        """The nodes below each node, by rank."""
        number: dict[Ranks, int] = {(): 0}
        children: list[list[int]] = [[] for _ in range(len(self))]
        for node, path in enumerate(self.paths, 1):
            number[path] = node
            children[number[path[:-1]]].append(node)
        return children


@dataclass(frozen=True)
class Conditions:
    """What a shape was made for. None: not stated."""

    temperature: float | None = None
    proposal: str | None = None  # how the children were chosen: configs.schema.Proposal
    draft: str | None = None
    traffic: str | None = None
    vectors: list[list[float]] | None = None  # [depth][rank]: acceptances that the shape was computed from
    expected_tokens: float | None = None  # per round, by those vectors
    rounds: int | None = None  # that the vectors rest on
    batch_size: int | None = None
    seconds: dict[str, Any] | None = None  # of the forwards that the size was weighed with, by size
    speedup: float | None = None  # predicted by these: seconds per token of plain decoding over the tree's
    measured: dict[str, Any] | None = None  # where: models.provenance


def write_shape(path: Path, shape: TreeShape, conditions: Conditions) -> None:
    """Writes `shape` and its conditions as JSON, atomically. Raises `StorageError`."""
    write_json(path, {"schema": SCHEMA, "paths": shape.paths, "conditions": asdict(conditions)})


def read_shape(path: Path) -> tuple[TreeShape, Conditions]:
    """Raises `StorageError` where the file cannot be read, `ConfigError` where it holds no shape."""
    with storage(path, "read"):
        contents = path.read_bytes()
    try:
        return parsed(json.loads(contents))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it lacks {error}." if isinstance(error, KeyError) else f"{error}."
    except ConfigError as error:
        reason = str(error)
    raise ConfigError(f"{path} is not a tree's shape: {reason} Write it anew: python -m eval.tree.")


def parsed(file: Any) -> tuple[TreeShape, Conditions]:
    """A shape file's contents. Raises various errors for anything else."""
    if file["schema"] != SCHEMA:
        raise ConfigError(f"its schema is {file['schema']!r}, and this version reads {SCHEMA}.")
    for path in file["paths"]:
        if not isinstance(path, list) or not all(type(rank) is int for rank in path):
            raise ConfigError(f"{path!r} is not a list of ranks.")
    unknown = file["conditions"].keys() - {field.name for field in fields(Conditions)}
    if unknown:
        raise ConfigError(f"it has unknown conditions: {', '.join(sorted(unknown))}.")
    for name, value in file["conditions"].items():
        if value is not None and not STATED[name](value):
            raise ConfigError(f"its condition {name} cannot be {json.dumps(value)[:40]}.")
    return TreeShape(tuple(map(tuple, file["paths"]))), Conditions(**file["conditions"])


# ---- what a condition may be ----


def is_number(value: Any) -> bool:
    """Neither negative nor infinite, nor NaN."""
    return type(value) in (int, float) and 0 <= value < math.inf


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_vectors(value: Any) -> bool:
    """Rows of one length, each of probabilities that exclude each other."""
    return isinstance(value, list) and all(
        isinstance(row, list)
        and len(row) == len(value[0]) > 0
        and all(map(is_number, row))
        and sum(row) <= 1 + 1e-9
        for row in value
    )


def is_times(value: Any) -> bool:
    """Seconds by size, of the parts of a round; of the decoder itself at least."""
    return (
        isinstance(value, dict)
        and "host" in value
        and all(
            isinstance(part, dict)
            and all(size.isdecimal() and int(size) >= 1 and is_number(part[size]) for size in part)
            for part in value.values()
        )
    )


STATED: dict[str, Callable[[Any], bool]] = {
    "temperature": is_number,
    "proposal": is_text,
    "draft": is_text,
    "traffic": is_text,
    "vectors": is_vectors,
    "expected_tokens": is_number,
    "rounds": is_count,
    "batch_size": is_count,
    "seconds": is_times,
    "speedup": is_number,
    "measured": is_object,
}
