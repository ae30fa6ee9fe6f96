"""`python -m scripts.engines [NAME ...]`: builds the environments of the engines named, or of all."""

from __future__ import annotations

import sys

from configs.entry import paragraphs
from scripts.engines.environment import build, names

if __name__ == "__main__":
    with paragraphs():
        for name in sys.argv[1:] or names():
            build(name)
