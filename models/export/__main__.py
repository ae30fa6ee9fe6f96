"""`python -m models.export`: the draft of a run as folders that engines load, each with the command that
serves it.

A folder appears under its name only after it was read back, independently, and gave the trained network's
numbers.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.entry import entry
from configs.errors import ConfigError
from configs.schema import Config
from models.checkpoint import find_draft, load_draft
from models.export.layout import write_export
from models.files import ensure_writable
from models.target import Target


@entry()
def main(config: Config) -> None:
    export(config, Console())


def export(config: Config, console: Console) -> list[Path]:
    """Writes one folder for each of `export.engines`, or none of them if one engine cannot express the draft.

    The weights are those that decode beside this target: in `target.dtype`.
    Raises `ConfigError`, `CheckpointError` or `StorageError`.
    """
    source = find_draft(config.export.draft, Path(config.runs), config.experiment)
    output = Path(config.export.output) if config.export.output else default_output(source)
    ensure_writable(output)
    target = Target.load(config.target)
    draft = load_draft(source, target)
    method = exporter(str(draft.method))
    for engine in config.export.engines:
        if engine not in method.LAYOUTS:
            raise ConfigError(
                f"export.engines has {engine!r}; known for {draft.method}: {', '.join(method.LAYOUTS)}."
            )
        method.refuse(engine, draft)
    served = str(Path(target.name).resolve()) if Path(target.name).is_dir() else target.name
    written = []
    for engine in config.export.engines:
        folder = output / engine
        layout = method.LAYOUTS[engine](draft, target)
        write_export(
            folder, layout, target.tokenizer, lambda temporary: method.check(temporary, draft, target)
        )
        console.print(
            f"{engine}: {folder} (read back and equal to the trained draft)", markup=False, soft_wrap=True
        )
        if layout.needs:
            console.print(f"  {layout.needs}", markup=False, soft_wrap=True)
        command = method.serve(engine, served, folder, max(config.decode.draft_tokens, 1))
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
        written.append(folder)
    if config.target.gguf_file:
        console.print(
            f"Serve the dequantised target, saved as safetensors, in place of {target.name}: a draft fits "
            "no other.",
            markup=False,
        )
    return written


def exporter(method: str) -> Any:
    """The module `models/export/<method>.py`."""
    try:
        return import_module(f"models.export.{method}")
    except ModuleNotFoundError as error:
        if error.name != f"models.export.{method}":
            raise
        networks = Path(__file__).parents[1]
        known = sorted(
            f.stem for f in Path(__file__).parent.glob("[a-z]*.py") if (networks / f.name).exists()
        )
        raise ConfigError(
            f"Drafts of method {method} cannot be exported yet; those of {', '.join(known)} can."
        ) from None


def default_output(draft: Path) -> Path:
    """export/ in the draft's run; beside a draft that lies elsewhere, a folder named after it."""
    return draft.with_name("export" if draft.name == "draft" else f"{draft.name}-export")


if __name__ == "__main__":
    main()
