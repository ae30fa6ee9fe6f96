"""`python -m models.export`: the draft of a run as folders that engines load, each with the command that
serves it and a model card.

A folder appears under its name only after it was read back, independently, and gave the trained network's
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.entry import entry
from configs.errors import CheckpointError, ConfigError
from configs.schema import Config
from models.checkpoint import find_draft, load_draft
from models.export import card, gguf
from models.export.layout import Layout, write_export
from models.files import ensure_writable
from models.hub import push
from models.target import Target

USUAL = ("vllm", "sglang")


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
    checkout = Path(config.export.llama_cpp).expanduser() if config.export.llama_cpp else None
    if checkout is not None:
        gguf.require(checkout)
    config = beside_its_target(config, source)
    target = Target.load(config.target)
    draft = load_draft(source, target)
    method = exporter(str(draft.method))
    layouts = {engine: method.LAYOUTS[engine](draft, target) for engine in accepted(config, method, draft)}
    served = str(Path(target.name).resolve()) if Path(target.name).is_dir() else target.name
    depth = min(max(config.decode.draft_tokens, 1), getattr(draft, "heads", config.decode.draft_tokens) or 1)
    facts = card.facts(config, source, target, draft)
    for engine, layout in layouts.items():
        folder = output / engine

        def commands(where: Path, engine: str = engine, folder: Path = folder) -> str:
            """As they will be once `where` has its final name."""
            return method.serve(engine, served, where, depth).replace(
                str(where.resolve()), str(folder.resolve())
            )

        def verify(where: Path, engine: str = engine) -> None:
            method.check(where, draft, target)
            if engine == "llama_cpp" and checkout is not None:
                gguf.convert(where, checkout, None if draft.method == "small" else served)

        def texts(where: Path, engine: str = engine, layout: Layout = layout) -> dict[str, str]:
            return card.texts(facts, engine, layout, commands(where))

        write_export(folder, layout, target.tokenizer, verify, texts)
        say(console, engine, folder, layout, commands)
    if config.target.gguf_file:
        console.print(
            f"Serve the dequantised target, saved as safetensors, in place of {target.name}: a draft fits "
            "no other.",
            markup=False,
        )
    folders = [output / engine for engine in layouts]
    if config.export.push:
        console.print(push(folders, config.export.push), markup=False, soft_wrap=True)
    return folders


def say(console: Console, engine: str, folder: Path, layout: Layout, commands: Callable[[Path], str]) -> None:
    lines = [f"{engine}: {folder} (read back and equal to the trained draft)"]
    lines += [f"  {line}" for line in [layout.needs, *commands(folder).splitlines()] if line]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def beside_its_target(config: Config, source: Path) -> Config:
    """A run that trained the target too (Medusa-2) wrote it beside its draft: that one is served."""
    own = source.with_name("target")
    if source.name != "draft" or not (own / "config.json").is_file():
        return config
    return replace(config, target=replace(config.target, name=str(own), revision=None, gguf_file=None))


def accepted(config: Config, method: Any, draft: Any) -> list[str]:
    """The engines to export for, each known and able to express the draft."""
    if not method.LAYOUTS:
        raise CheckpointError(method.UNREAD)
    if getattr(draft, "own_embedding", False):
        raise CheckpointError(
            "This draft brings a token embedding of its own, and exports share the target's. Serve the "
            "published files that it came from."
        )
    engines = config.export.engines
    if engines is None:
        engines = [engine for engine in USUAL if engine in method.LAYOUTS]
    for engine in engines:
        if engine not in method.LAYOUTS:
            raise ConfigError(
                f"export.engines has {engine!r}; known for {draft.method}: {', '.join(method.LAYOUTS)}."
            )
        method.refuse(engine, draft)
    return engines


def exporter(method: str) -> Any:
    """The module `models/export/<method>.py`."""
    try:
        return import_module(f"models.export.{method}")
    except ModuleNotFoundError as error:
        if error.name != f"models.export.{method}":
            raise
        raise ConfigError(
            f"Drafts of method {method} cannot be exported yet; those of {', '.join(exported())} can."
        ) from None


def exported() -> list[str]:
    """The methods that some engine reads."""
    networks = Path(__file__).parents[1]
    here = sorted(f.stem for f in Path(__file__).parent.glob("[a-z]*.py") if (networks / f.name).exists())
    modules = {name: import_module(f"models.export.{name}") for name in here}
    return [name for name, module in modules.items() if getattr(module, "LAYOUTS", None)]


def default_output(draft: Path) -> Path:
    """export/ in the draft's run; beside a draft that lies elsewhere, a folder named after it."""
    return draft.with_name("export" if draft.name == "draft" else f"{draft.name}-export")


if __name__ == "__main__":
    main()
