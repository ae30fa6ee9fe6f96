"""A trained draft in the formats that serving engines load. `models/export/<method>.py` knows one method's
formats:

`LAYOUTS`, engine name -> function (draft, target) -> Layout; `refuse(engine, draft)`, which raises for what
an engine cannot express; `check(folder, draft, target)`, which reads a written folder back by itself and
raises unless it computes what the draft computes; and `serve(engine, target, folder, draft_tokens)`, the
command that serves it.
"""
