"""`python -m models.imports`: a published draft as one of Leadout's own. `imports.*` decides what its files
do not say.

`eval.measure` and the others read published drafts as they are. This is for one that they read by the wrong
convention, or refuse, and for a draft that is to be kept as it was measured.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from configs.entry import entry
from configs.errors import ConfigError
from configs.schema import Config
from models.checkpoint import find_draft, is_published, save_draft
from models.hub import slug
from models.imports import read_published
from models.target import Target


@entry()
def main(config: Config) -> None:
    convert(config, Console())


def convert(config: Config, console: Console) -> Path:
    """Writes the draft and returns its folder. Raises `ConfigError`, `CheckpointError` or `StorageError`."""
    named = config.imports.draft
    if named is None:
        raise ConfigError(
            "imports.draft is not set: name a published draft's folder, or its name on the hub."
        )
    runs = Path(config.runs)
    source = find_draft(named, runs, config.experiment)
    if not is_published(source):
        raise ConfigError(f"imports.draft={named} is a draft of Leadout's own already: use it as it is.")
    output = Path(config.imports.output) if config.imports.output else runs / "imports" / slug(named)
    target = Target.load(config.target)
    draft, notes = read_published(source, target, config.imports)
    for note in notes:
        console.print(f"  {note}", markup=False, soft_wrap=True)
    save_draft(output / "draft", draft, target, {"imported": named, "read": notes})
    console.print(
        f"{draft.method}: {output / 'draft'}. Measure it with eval.draft={output}",
        markup=False,
        soft_wrap=True,
    )
    return output / "draft"


if __name__ == "__main__":
    main()
