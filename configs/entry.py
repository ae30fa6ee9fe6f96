"""The entry points' decorator: Hydra composes `configs/`, a mendable error becomes one paragraph.

    @entry()
    def main(config: Config) -> None: ...

    if __name__ == "__main__":
        main()

`python -m data.prepare +experiment=smollm2_cpu data.heldout_fraction=0.1` then runs `main` with the checked
`Config`. Hydra's own flags work as ever (`--help`, `--cfg job`, `-m` for sweeps).

Exit status: 0 done; 2 an error whose message says how to mend it; 130 interrupted; 1 a defect of ours, which
keeps its traceback; 3 eval.lossless found something, or eval.ab had too
many failed requests to tell.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from configs.compose import FOLDER, causes, explain, resolve
from configs.errors import LeadoutError
from configs.schema import Config

# What a write meets on a full disk, over a quota, on a read-only mount or without permission.
STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def entry(config_name: str = "config") -> Callable[[Callable[[Config], None]], Callable[[], None]]:
    """Turns `main(config: Config) -> None` into an entry point over `configs/<config_name>.yaml`."""

    def decorate(main: Callable[[Config], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def job(cfg: DictConfig) -> None:
            with paragraphs():
                show_lines_at_once()
                config = resolve(cfg)
                announce_sweep()
                quiet_libraries()
                if config.threads is not None:
                    import torch  # not above: a refused configuration need not wait for torch to load

                    torch.set_num_threads(config.threads)
                main(config)

        run = hydra.main(version_base="1.3", config_path=str(FOLDER), config_name=config_name)(job)

        @functools.wraps(main)
        def from_command_line() -> None:
            with paragraphs(), full_hydra_errors():
                run()

        return from_command_line

    return decorate


@contextmanager
def paragraphs() -> Iterator[None]:
    """A mendable error leaves as one paragraph on stderr and an exit status; the rest pass through."""
    try:
        yield
    except KeyboardInterrupt:
        leave("interrupted; run the same command to go on", 130)
    except LeadoutError as error:
        leave(str(error), 2)
    except (HydraException, OmegaConfBaseException) as error:
        leave(explain(error), 2)
    except Exception as error:
        if (message := storage_trouble(error)) is None:
            raise
        leave(message, 2)


def show_lines_at_once() -> None:
    """A log file that someone watches gets each line when it is printed, as a terminal does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def leave(message: str, status: int) -> NoReturn:
    """Prints `message` as one paragraph on stderr and exits."""
    print(" ".join(message.split()), file=sys.stderr, flush=True)
    raise SystemExit(status)


@contextmanager
def full_hydra_errors() -> Iterator[None]:
    """Within, Hydra raises what went wrong instead of printing its own shortened traceback."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def storage_trouble(error: BaseException) -> str | None:
    """The paragraph for a full disk or a folder that cannot be written, else None.

    Libraries written in other languages report a full disk as their own types, hence the look at the text.
    """
    mend = (
        "Make room or choose other folders (data.folder=..., runs=...), then run the same command again; "
        "what was finished is kept."
    )
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in STORAGE_ERRNOS:
            place = f" at {cause.filename}" if cause.filename else ""
            return f"{cause.strerror}{place}. {mend}"
        if "No space left on device" in str(cause):
            return f"No space left on device. {mend}"
    return None


def announce_sweep() -> None:
    """In a sweep (`-m`), says which job starts."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        print(f"job {HydraConfig.get().job.num}: {' '.join(HydraConfig.get().overrides.task)}", flush=True)


def quiet_libraries() -> None:
    """Libraries report errors only, and draw no progress bars outside a terminal.

    The environment variables are for libraries imported later, the calls for those imported already.
    """
    bars = sys.stderr.isatty()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not bars:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        os.environ["TQDM_DISABLE"] = "1"
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        if not bars:
            transformers_logging.disable_progress_bar()
    if "datasets" in sys.modules and not bars:
        from datasets import disable_progress_bars

        disable_progress_bars()
