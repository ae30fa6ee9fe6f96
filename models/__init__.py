"""The target and every draft network. A method `x` is `models/x.py`: see `draft_class`."""

from models.checkpoint import draft_class, find_draft, load_draft, save_draft

__all__ = ["draft_class", "find_draft", "load_draft", "save_draft"]
