"""The pages in headless Chromium: nothing in its console, nothing asked of the network, nothing wider than a
telephone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eval.compare import report as compare_report
from eval.comparison import Measured, comparison
from eval.report import report
from tests.eval.samples import draft_run, measurement, pair, plain_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the pages with")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--enable-logging=stderr",
    "--window-size=1280,2000", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


def opened(folder: Path, page: str) -> tuple[list[str], list[str]]:
    """(lines of the console, addresses asked for that are no files), after `page` has been shown."""
    file, log = folder / "page.html", folder / "net.json"
    file.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--dump-dom",
         file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    # Chromium asks for things of its own, too; the page's requests begin at a file, whose origin is opaque.
    asked = r'"initiator":"(?:null|file://)".*?"url":"((?:https?|wss?|ftp):[^"]+)"'
    return console, sorted(set(re.findall(asked, log.read_text(encoding="utf-8"))))


def sweep() -> dict[str, Any]:
    """Two temperatures and two batch sizes, and enough values for every picture."""
    words = [*range(1, 13)]
    pairs = [
        pair(
            f"{name}{i}", plain_run(words), draft_run(words, [2, 1, 2, 2]),
            category=name, temperature=t, batch_size=b,
        )
        for name in ("maths", "a category with a long name", "<script>console.error(1)</script>")
        for i in range(6)
        for t in (0.0, 1.0)
        for b in (1, 4)
    ]  # fmt: skip
    sample = {
        "prompt": "maths0",
        "category": "maths",
        "temperature": 0.0,
        "pieces": [["a <b>", False], ["\n c", True]],
    }
    return measurement(pairs, samples=[sample], advice=["Use it: 1.5×."])


def side_by_side() -> str:
    several = [
        Measured(name, Path(__file__), sweep()) for name in ("one", "another with a long name", "a third")
    ]
    return compare_report(several, comparison(several))


@pytest.mark.parametrize("page", [report(sweep()), side_by_side()], ids=["report", "compare"])
def test_quiet_and_alone(tmp_path: Path, page: str) -> None:
    assert page.count("<svg") > 8
    assert opened(tmp_path, page) == ([], [])


def test_what_would_be_wrong_is_seen(tmp_path: Path) -> None:
    bad = '<svg><path d="nonsense"/></svg><img src="http://leadout.invalid/x.png">'
    console, urls = opened(tmp_path, f"<html><body>{bad}</body></html>")
    assert any("attribute d" in line for line in console)
    assert urls == ["http://leadout.invalid/x.png"]
