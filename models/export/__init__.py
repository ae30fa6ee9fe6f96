"""A trained draft in the formats that serving engines load. `models/export/<method>.py` knows one method's
formats:

`LAYOUTS`, engine name -> function (draft, target) -> Layout, which raises for a target that the engine cannot
combine with it; `refuse(engine, draft)`, which raises for what an engine cannot express; `check(folder,
draft, target)`, which reads a written folder back by itself and raises unless it computes what the draft
computes; and `serve(engine, target, folder, draft_tokens)`, the commands that serve it, one a line. Where
engines have a draft propose otherwise than it was trained to, `as_served(draft)` is one that does as they do.
A method that no engine reads has no LAYOUTS and says why in `UNREAD`.

layout.py writes folders, agreement.py says when one is right, card.py describes it.
"""
