"""From the YAML files and a command line's overrides to a checked `Config`, with errors that teach."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from configs.errors import ConfigError
from configs.hardware import native_dtype
from configs.rules import check
from configs.schema import Config, nearest

FOLDER = Path(__file__).resolve().parent

ConfigStore.instance().store(
    name="schema", node=Config
)  # config.yaml's first default: it types the whole tree
OmegaConf.register_new_resolver("native_dtype", native_dtype, replace=True)


def compose(overrides: Sequence[str]) -> Config:
    """The checked configuration that a command line's overrides give, as in ["+experiment=smollm2_cpu"]."""
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            return resolve(hydra_compose("config", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from None


def as_plain(config: Config) -> dict[str, Any]:
    """A configuration as JSON holds it."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(name): part for name, part in plain.items()}


def resolve(cfg: DictConfig) -> Config:
    """What Hydra composed, as a `Config` whose every value is set, known, of its type and possible."""
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        first = (
            "Add an experiment, as in +experiment=smollm2_cpu, or set" if "experiment" in missing else "Set"
        )
        raise ConfigError(
            f"No value for {', '.join(missing)}. {first} each as key=value on the command line."
        )
    schema = OmegaConf.structured(Config)
    try:
        # Merged into a fresh schema because keys added with Hydra's "+" were checked against nothing yet.
        config = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.to_container(cfg, resolve=True)))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None
    assert isinstance(config, Config)
    check(config)
    return config


def explain(error: BaseException) -> str:
    """What an error of Hydra or OmegaConf means in our terms, and what to do about it."""
    chain = list(causes(error))
    text = str(error)
    if isinstance(error, MissingConfigException):
        return _no_such_option(error)
    if isinstance(error, OverrideParseException):
        return (
            f"'{error.override}' on the command line is no override: write key=value, as in "
            f"trainer.epochs=3, or +experiment=NAME. ({error.message.splitlines()[0].strip()})"
        )
    if "use +experiment=" in text:
        return "An experiment is added, not overridden: write +experiment=NAME, with the plus sign."
    refused = next(
        (cause for cause in chain if isinstance(cause, OmegaConfBaseException) and cause.full_key), None
    )
    if refused is None:
        return text
    key = str(refused.full_key)
    place = f" ({found[0]})" if (found := re.match(r"In '[^']+'", text)) else ""
    if isinstance(refused, ConfigKeyError | AttributeError):
        advice = "Add --cfg job to the command to see every key with its value."
        return f"Unknown configuration key '{key}'{place}.{nearest(key, known_keys())} {advice}"
    return f"Configuration key '{key}'{place}: {str(refused).splitlines()[0].rstrip('.')}."


def _no_such_option(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(file.stem for file in (FOLDER / group).glob("*.yaml"))
    return (
        f"There is no {group}={option}.{nearest(option, options)} Options of {group}: {', '.join(options)}."
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what it was raised from, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def known_keys() -> list[str]:
    """Every dotted key: the schema's groups and values, and what the method files add under `method`."""
    keys = set(_dotted(OmegaConf.structured(Config)))
    for file in (FOLDER / "method").glob("*.yaml"):
        method = OmegaConf.load(file)
        assert isinstance(method, DictConfig)
        keys.update(_dotted(method, "method."))
    return sorted(keys)


def _dotted(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        yield f"{prefix}{key}"
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            yield from _dotted(node[key], f"{prefix}{key}.")
