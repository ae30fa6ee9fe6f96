"""The check of JSON schemas on a tiny pair: what it counts, and that a killed run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decoding.decoder import Decoder
from models.checkpoint import save_draft
from models.target import save_target
from scripts.check_grammar import Outcome, main, parsed, summed
from tests.conftest import tiny_draft, tiny_target

METHODS = ["plain", "forced", "lookup", "chain", "dynamic"]


def outcome(equal: bool = True, **changes: Any) -> Outcome:
    return Outcome(
        **{
            "finished": True,
            "parsed": True,
            "valid": True,
            "tokens": 5,
            "rounds": 2,
            "seconds": 2.0,
            **changes,
        },
        equal=equal,
    )


def test_sums_of_outcomes() -> None:
    plain = [outcome(rounds=4, seconds=4.0), outcome(rounds=4, seconds=4.0)]
    row = summed([outcome(), outcome(valid=False)], plain)
    assert (row["requests"], row["finished"], row["valid"], row["equal_to_plain"]) == (2, 2, 1, 2)
    # Prefill emits the first of 5 tokens: 8 in 4 rounds. 10 tokens in 4 s, plainly in 8.
    assert (row["mean_acceptance_length"], row["tokens_per_s"], row["speedup"]) == (2.0, 2.5, 2.0)
    assert row["speedup_ci"] == (2.0, 2.0)
    other = summed([outcome(), outcome(equal=False)], plain)
    assert other["equal_to_plain"] == 1
    assert other["speedup"] is other["speedup_ci"] is None


def test_null_is_json_and_half_an_object_is_not() -> None:
    assert [parsed(text) for text in ("null", '{"a"', "")] == [(None,), None, None]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """For three schemas that the tiny alphabet can follow, and one that no grammar enforces."""
    target = tiny_target()
    save_target(target, tmp_path / "target")
    save_draft(tmp_path / "draft", tiny_draft(target), target, {})
    schemas = [
        {"type": "integer"},
        {"type": "integer", "minimum": 10},
        {"type": "nothing"},
        {"enum": [7, 12]},
    ]
    lines = [
        json.dumps({"id": f"r{i}", "messages": [{"role": "user", "content": "hi"}], "schema": schema})
        for i, schema in enumerate(schemas)
    ]
    (tmp_path / "schemas.jsonl").write_text("\n".join(lines) + "\n")
    folders = {"--target": "target", "--draft": "draft", "--out": "out.json"}
    options = [part for option, name in folders.items() for part in (option, str(tmp_path / name))]
    return [str(tmp_path / "schemas.jsonl"), *options, "--max-new-tokens", "24"]


def test_every_method_says_the_same(arguments: list[str], tmp_path: Path) -> None:
    main(arguments)
    written = json.loads((tmp_path / "out.json").read_text())
    assert [*written["rows"]] == METHODS
    for row in written["rows"].values():
        assert row["requests"] == row["equal_to_plain"] == 3
        assert row["finished"] == row["parsed"] == row["valid"] >= 1
    (refused,) = written["refused"]
    assert refused.startswith("r2: A JSON schema cannot be")
    assert written["settings"]["schemas"] == 200
    assert not (tmp_path / "out.partial.jsonl").exists()


def test_a_killed_run_goes_on(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[int] = []
    real = Decoder.generate_all

    def counting(decoder: Decoder, requests: Any, **options: Any) -> Any:
        if requests[0].grammar is not None:
            began.append(1)
            if len(began) == 8:  # in the middle of the second schema
                raise KeyboardInterrupt
        return real(decoder, requests, **options)

    monkeypatch.setattr(Decoder, "generate_all", counting)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 130
    assert len((tmp_path / "out.partial.jsonl").read_text().splitlines()) == 2  # the key, and a schema
    main([*arguments, "--schemas", "2"])
    assert len(began) == 8 + len(METHODS)
    written = json.loads((tmp_path / "out.json").read_text())
    assert {row["requests"] for row in written["rows"].values()} == {2}
    main(arguments)  # begins anew: it was finished
    assert len(began) == 8 + 4 * len(METHODS)


def test_a_missing_file_is_a_paragraph(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["absent.jsonl", *arguments[1:]])
    assert stop.value.code == 2
    assert "There is no absent.jsonl." in capsys.readouterr().err


def test_nothing_that_could_be_decoded(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "schemas.jsonl").write_text("")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
