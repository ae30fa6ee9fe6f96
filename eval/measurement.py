"""A measurement as others read it: the contents of a measure.json, rows by setting, and words for them.

A setting is what is measured apart: a temperature and a batch size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema

from configs.errors import MeasurementError

Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]  # by category and context bucket
Setting = tuple[float, int]  # temperature, batch size

SCHEMA = Path(__file__).with_name("measure.schema.json")


def measurement_file(path: Path) -> Path:
    return path / "measure.json" if path.is_dir() else path


def read_measurement(path: Path) -> dict[str, Any]:
    """The measurement in a measure.json, or in the folder of one. Raises `MeasurementError` for anything
    else."""
    file = measurement_file(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MeasurementError(f"There is no {file}. python -m eval.measure writes one.") from None
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{file} cannot be read as JSON ({error}). Name a measure.json.") from None
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    wanted = schema["properties"]["schema"]["const"]
    if not isinstance(found, dict) or found.get("schema") != wanted:
        said = found.get("schema") if isinstance(found, dict) else None
        raise MeasurementError(
            f"{file} is no measurement: its schema is {said!r} and not {wanted!r}. Name a measure.json as "
            "python -m eval.measure writes it."
        )
    if (wrong := next(jsonschema.Draft202012Validator(schema).iter_errors(found), None)) is not None:
        raise MeasurementError(
            f"{file} is no whole measurement: at {wrong.json_path}, {wrong.message[-160:]}. It may be of an "
            "earlier version: measure again."
        )
    return found


def settings_of(rows: Sequence[Row]) -> list[Setting]:
    return sorted({(row["temperature"], row["batch_size"]) for row in rows})


def split(measurement: dict[str, Any], setting: Setting) -> tuple[Rows, Rows]:
    """(speculative rows, plain rows) of a setting."""
    here = [row for row in measurement["rows"] if (row["temperature"], row["batch_size"]) == setting]
    drafted, plain = (
        {(r["category"], r["context_bucket"]): r for r in here if (r["method"] == "plain") is wanted}
        for wanted in (False, True)
    )
    return drafted, plain


# ---- words ----


def named(setting: Setting) -> str:
    return f"temperature {setting[0]:g}, batch {setting[1]}"


def anchor(setting: Setting) -> str:
    return f"t{setting[0]:g}-b{setting[1]}"


def tree(row: Row) -> str:
    """What a round of a speculative row drafts, as in "chain of 4"."""
    match row["tree"]:
        case "chain":
            return f"chain of {row['draft_tokens']}"
        case "dynamic":
            return (
                f"dynamic tree of {row['tree_nodes']}, {row['tree_width']} wide and up to "
                f"{row['draft_tokens']} deep"
            )
        case kind:
            return f"{kind} tree of {row['tree_nodes']}"


def drafting(row: Row) -> str:
    """Everything that a speculative row says of how its tokens were drafted."""
    said = [tree(row), f"{row['proposal']} proposals", f"by {' and '.join(row['drafters'])}"]
    if row["tree_file"] is not None:
        said.insert(1, f"shape from {row['tree_file']}")
    if row["stop_drafting"] not in (None, "fixed"):
        said.append(f"stopped by {row['stop_drafting']}")
    return ", ".join(said)


def place(measurement: dict[str, Any]) -> str:
    """What the models ran on."""
    hardware = measurement["hardware"]
    if hardware["gpu"] and measurement["target"]["device"].startswith("cuda"):
        return ", ".join(gpu["name"] for gpu in hardware["gpu"])
    return f"{hardware['cpu']} ({hardware['cores']} cores)"


def commit(git: dict[str, Any] | None) -> str:
    return git["commit"][:12] + (" with local changes" if git["dirty"] else "") if git else "none"
