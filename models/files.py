"""Files that are either whole or absent: atomic writes, append-only JSON lines, hashes.

A process may be killed or a disk may fill at any moment. Whatever has its final name is complete: contents go
to a hidden sibling first, are flushed to the disk and then renamed (`os.replace` is atomic within a file
system). Lines are appended whole, and the one line a kill may have torn is recognised when the file is read
or opened again.

Operating-system errors become `StorageError`s that say what to do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import safetensors.torch
from torch import Tensor

from configs.errors import StorageError

MENDS = {
    errno.ENOSPC: "the disk is full: free some space, or choose a folder on another disk, and run again",
    errno.EDQUOT: "your disk quota is used up: free some space, or choose another folder, and run again",
    errno.EROFS: "the file system is read-only: choose a folder that can be written",
    errno.EACCES: "permission is missing: choose a folder you may write, or change its permissions",
    errno.EPERM: "permission is missing: choose a folder you may write, or change its permissions",
    errno.ENOTDIR: "a part of that path is a file: choose another folder, or move the file away",
    errno.EEXIST: "a file stands where a folder is needed: choose another folder, or move the file away",
    errno.ENOENT: "a part of that path does not exist: check it for typing errors",
}


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write(temporary)` and renames the file it wrote to `path`, replacing an earlier one.

    Missing parent folders are made. The temporary sibling is removed when anything fails, an interrupt
    included, and what stood at `path` then stays as it was. Raises `StorageError` for operating-system
    errors.
    """
    temporary = sibling(path, "tmp")
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write(temporary)` on a new empty folder and renames it to `folder`, replacing an earlier one.

    A folder that is not empty cannot be replaced in one step: a kill between the two renames leaves the
    earlier one whole beside it as `.<name>.<pid>.old`. Raises `StorageError` for operating-system errors.
    """
    temporary, old = sibling(folder, "tmp"), sibling(folder, "old")
    with storage(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had our number
        try:
            temporary.mkdir()
            write(temporary)
            for file in [*temporary.rglob("*"), temporary]:
                sync(file)
            if folder.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(folder, old)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if old.exists() and not folder.exists():
                os.replace(old, folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data`, atomically."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(data)

    write_atomic(path, write)


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8, atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, obj: Any) -> None:
    """Writes `obj` as indented JSON, atomically. NaN and infinity are a `ValueError`: absent is null."""
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file, atomically. Serialised in memory first, because safetensors' own writer
    reports a full disk as an error that is no `OSError`."""
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = safetensors.torch.save(contents, metadata={"format": "pt", **(metadata or {})})
    write_bytes(path, data)


def sha256_file(path: Path) -> str:
    """SHA-256 of the file's bytes, as 64 hexadecimal digits."""
    with storage(path, "read"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_append(path: Path) -> TextIO:
    """`path` opened for `append_line`, after mending its end: a line torn by a kill is cut off."""
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            mend_end(path)
        return open(path, "a", encoding="utf-8")


def append_line(destination: TextIO | Path, obj: Any) -> None:
    """Appends `obj` as one line of JSON, on the disk when this returns.

    A path is opened, mended and closed each time; a handle comes from `open_append`. NaN and infinity are
    refused.
    """
    if isinstance(destination, Path):
        with open_append(destination) as handle:
            append_line(handle, obj)
        return
    line = json.dumps(obj, ensure_ascii=False, allow_nan=False) + "\n"
    with storage(Path(destination.name)):
        destination.write(line)
        destination.flush()
        with suppress_unsyncable():
            os.fsync(destination.fileno())


def lines_under(path: Path, key: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that an interrupted job left in `path`, without the first, which says what they belong to. If
    that is not `key`, or nothing is there, the file is begun anew."""
    lines = read_lines(path) if path.exists() else []
    if not lines or lines[0] != key:
        path.unlink(missing_ok=True)
        append_line(path, key)
        return []
    return lines[1:]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; as `lines_at`."""
    return [row for _, row in lines_at(path)]


def lines_at(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where it begins, in bytes; the object) of each line of a JSON-lines file, one in memory at a time.
    Only the last line may be torn (a kill while it was written): it is dropped.

    Raises `StorageError` for a missing file and for any other line that is not a JSON object.
    """
    at = 0
    with storage(path, "read"), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            row = parsed(line)
            if row is not None:
                yield at, row
            elif line.strip() and line.endswith(b"\n"):
                raise StorageError(
                    f"Line {number} of {path} is not a JSON object, and only a last line can be torn by an "
                    "interruption. The file was edited or damaged: remove that line, or the file, and run "
                    "again."
                )
            at += len(line)


def ensure_writable(folder: Path) -> None:
    """Makes `folder` and writes a file there, so that a run that cannot write fails before its work."""
    probe = sibling(folder / "write", "probe")
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"\0")
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)


def sibling(path: Path, suffix: str) -> Path:
    """A hidden name beside `path`, on the same file system, that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{suffix}")


def sync(path: Path) -> None:
    """Flushes a file's or a folder's contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress_unsyncable():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def suppress_unsyncable() -> Iterator[None]:
    """Passes over file systems and pipes that do not support fsync; every other error stands."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


@contextmanager
def storage(path: Path, doing: str = "write") -> Iterator[None]:
    """Turns an `OSError` into a `StorageError` naming `path`, what the system said, and the mend."""
    try:
        yield
    except OSError as error:
        mend = MENDS.get(error.errno or 0, "see that the disk is present and healthy, and run again")
        raise StorageError(
            f"Cannot {doing} {path}: {error.strerror or error}. To mend it: {mend}."
        ) from error


def parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`, or None."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def mend_end(path: Path) -> None:
    """Makes the file end with a newline: a whole last line gets one, a torn one is cut off."""
    with open(path, "r+b") as file:
        start, last = last_line(file)
        if not last:
            return
        if parsed(last) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(start)


def last_line(file: BinaryIO) -> tuple[int, bytes]:
    """(where it begins, what stands there) after the last newline of a file."""
    start, last = file.seek(0, os.SEEK_END), b""
    while start and b"\n" not in last:
        size = min(start, 1 << 16)
        start = file.seek(start - size)
        last = file.read(size) + last
    newline = last.rfind(b"\n") + 1
    return start + newline, last[newline:]
