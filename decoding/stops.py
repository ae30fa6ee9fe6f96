"""Stop strings, looked for in the text while tokens arrive, since one may span tokens or end inside one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer decodes to while a character lacks bytes


class StopScan:
    """Reads one sequence's new tokens in order and says which one completes a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self.kept = max(map(len, self.stops), default=1) - 1  # characters that may begin a stop string
        self.tail = ""  # the text's last characters, as far as they are final
        self.window: list[int] = []  # the last tokens: those in `tail`, for context, then those not yet in it
        self.read = 0  # how many of `window` are in `tail`

    def completes(self, token: int) -> bool:
        """Whether the text up to `token`, which is the next one, contains a stop string."""
        if not self.stops:
            return False
        self.window.append(token)
        # Decoded with the tokens before it: some tokenizers strip spaces at the beginning of a text.
        before = self.decode(self.window[: self.read])
        after = self.decode(self.window)
        text = self.tail + after[len(before) :]
        if any(stop in text for stop in self.stops):
            return True
        if not after.endswith(UNFINISHED):
            self.tail = text[-self.kept :] if self.kept else ""
            self.window = self.window[self.read :]
            self.read = len(self.window)
        return False

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
