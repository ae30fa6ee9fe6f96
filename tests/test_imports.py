"""Imports run one way: configs, models, decoding, data, then train and eval; none go to scripts or tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "configs": set(),
    "models": {"configs"},
    "decoding": {"configs", "models"},
    "data": {"configs", "models", "decoding"},
    "train": {"configs", "models", "decoding", "data"},
    "eval": {"configs", "models", "decoding", "data"},
}
GUARDED = {*MAY_IMPORT, "scripts", "tests"}


def imported(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a module of `package`, inside functions and by string too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, level=level):
                above = package[: len(package) - level + 1] if level else []
                yield node.lineno, ".".join([*above, *([module] if module else [])])
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[name, *_]
            ):
                first = name.values[0] if isinstance(name, ast.JoinedStr) else name
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield node.lineno, first.value


def violations(source: str, module: str) -> list[str]:
    """The imports in `source`, the text of the dotted `module`, that its room may not make."""
    room, *_ = package = module.split(".")[:-1]
    found = []
    for line, name in imported(ast.parse(source), package):
        other = name.split(".")[0]
        if other in GUARDED - MAY_IMPORT[room] - {room}:
            found.append(f"{module}:{line} imports {name}")
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room}/ has no modules"
    found = [
        violation
        for file in files
        for violation in violations(file.read_text(), ".".join(file.relative_to(ROOT).with_suffix("").parts))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.x", "import decoding"),
        ("models.export.x", "from decoding.tree import chain"),
        ("models.export.x", "from ...data import tokens"),  # three dots from models.export.x: above models
        ("decoding.x", "def f():\n    from data.tokens import TokenRow"),
        ("train.x", "from eval import rows"),
        ("eval.x", "import torch, train.loop"),
        ("data.x", "importlib.import_module(f'train.objectives.{name}')"),
        ("configs.x", "from models.target import Target"),
        ("eval.x", "from scripts import demo"),
        ("train.x", "if True:\n    from tests.conftest import tiny_target"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.x", "from configs.schema import Config\nimport torch"),
        ("models.export.x", "from ..target import Target\nfrom . import layout"),
        ("eval.x", "from data.tokens import prompts\nfrom decoding import decoder"),
        ("train.x", "import_module(f'train.objectives.{name}')"),
        ("data.x", "import datasets, evaluate"),  # other distributions whose names begin alike
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert violations(source, module) == []
