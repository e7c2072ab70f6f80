"""Reading of a checkpoint's shards as data, so that nothing in its files is executed, whoever made them.

torch.distributed.checkpoint stores its table of contents (``.metadata``) as a pickle, and unpickles it and
every value that is not a tensor without restriction. Here the table may consist only of that library's own
records and of plain values, and other values are read by ``torch.load(weights_only=True)``. Anything else is
refused before it is built.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from common.errors import StoppedError
from common.files import regular_file


class CheckpointError(StoppedError):
    """A checkpoint that could not be written, or none that can be read; the message says what and why."""


def _path(*parts: str) -> str:
    """Stand-in for pathlib's classes, which hold where the shards were first written; nobody reads it."""
    return ""


def _empty() -> dict[Any, Any]:
    """Stand-in for OrderedDict, whose content is set key by key."""
    return {}


def _layout(name: str) -> torch.layout:
    """Stand-in for torch.serialization._get_layout."""
    return torch.strided


def _member(kind: Any, name: str) -> Any:
    """Stand-in for getattr, by which Python 3.11.0 to 3.11.3 name the member of an enumeration."""
    if kind is not torch_metadata._MEM_FORMAT_ENCODING or not isinstance(name, str):
        raise pickle.UnpicklingError("it asks for an attribute of something that is no enumeration")
    return kind[name]


RECORDS: tuple[type, ...] = (
    Metadata,
    BytesStorageMetadata,
    TensorStorageMetadata,
    torch_metadata.ChunkStorageMetadata,
    torch_metadata.MetadataIndex,
    torch_metadata.StorageMeta,
    torch_metadata.TensorProperties,
    torch_metadata._MEM_FORMAT_ENCODING,
    torch_files._StorageInfo,
)
"""Record types that a table of contents consists of."""
ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__qualname__): record for record in RECORDS},
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in torch.__dict__.values()
        if isinstance(dtype, torch.dtype)
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): _empty,
    ("builtins", "getattr"): _member,
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")
    },
}
"""(module, name) that a table may ask for -> the object that it gets."""


_InPython: Any = pickle._Unpickler  # type: ignore[attr-defined]  # the one in C cannot be told what to build


class _Unpickler(_InPython):  # type: ignore[misc]
    """Unpickler that builds only records and plain values."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint has") from None

    def load_build(self) -> None:
        """Set a record's fields. Anything else is refused: setting a class's fields would change it for the
        whole process."""
        if not isinstance(self.stack[-2], RECORDS):
            raise pickle.UnpicklingError("it changes something that is no record")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def load_setitem(self) -> None:
        self._check_key(self.stack[-2])
        super().load_setitem()

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        for key in self.stack[::2]:  # those since the mark
            self._check_key(key)
        super().load_setitems()

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def load_dict(self) -> None:
        for key in self.stack[::2]:
            self._check_key(key)
        super().load_dict()

    dispatch[pickle.DICT[0]] = load_dict

    def _check_key(self, key: Any) -> None:
        """Refuse a key that no table has. A few bytes can make a tuple of tuples of … whose hash takes
        for ever."""
        fields = vars(key) if isinstance(key, torch_metadata.MetadataIndex) else {"fqn": key, "offset": ()}
        if not (
            type(fields.get("fqn")) is str
            and isinstance(offset := fields.get("offset") or (), tuple)
            and all(type(number) is int for number in (*offset, fields.get("index") or 0))
        ):
            raise pickle.UnpicklingError("it has a key that is neither a name nor an index")

    def load_set(self) -> None:
        raise pickle.UnpicklingError("it has a set, which no table has")

    dispatch |= dict.fromkeys((pickle.EMPTY_SET[0], pickle.FROZENSET[0]), load_set)


def read_table(folder: Path) -> Metadata:
    """Return a checkpoint's table of contents. Raises CheckpointError for a table that does not consist of
    records and plain values, is damaged, or refers to files outside ``folder``."""
    path = folder / ".metadata"
    try:
        with regular_file(path).open("rb") as stream:
            table = _Unpickler(stream).load()
        _check(table)
    except CheckpointError:
        raise
    except Exception as error:  # an untrusted pickle may make its reader raise anything
        raise CheckpointError(
            f"{path} is not the table of contents of a checkpoint ({error}); nothing of it was run or loaded"
        ) from error
    return cast(Metadata, table)


def _check(table: Any) -> None:
    """Raise ValueError unless the fields of ``table`` are what a loader expects."""
    if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
        raise ValueError("it holds something else")
    for name, entry in table.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise ValueError(f"{name!r} is neither a tensor nor a value")
    for index, place in table.storage_data.items():
        if not isinstance(index, torch_metadata.MetadataIndex) or not isinstance(
            place, torch_files._StorageInfo
        ):
            raise ValueError(f"{index!r} has no place")
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{index.fqn!r} is outside the checkpoint: {place.relative_path}")
        if place.transform_descriptors:
            raise ValueError(f"{index.fqn!r} is encoded by {place.transform_descriptors}")


class Reader(FileSystemReader):
    """Reader of one checkpoint's shards, with a table of contents that was read as data."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError (``read_table``)."""
        super().__init__(folder)
        self.table = read_table(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the one table, never a table of a single rank: no checkpoint of this project has one."""
        self.table.storage_meta = torch_metadata.StorageMeta(load_id=self.load_id)
        return self.table


class Planner(DefaultLoadPlanner):
    """Load planner that reads values other than tensors (the optimizer's settings) as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def reason(error: BaseException) -> str:
    """Return one line about a failed save or load; for torch's CheckpointException, the failure of the lowest
    rank."""
    failures: dict[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
    for rank, (cause, _) in sorted(failures.items()):
        return f"rank {rank}: {reason(cause)}"
    lines = str(error).strip().splitlines() or [""]
    full = (
        " (torch's file writer stops so where a file may not grow)" if "inline_container" in lines[0] else ""
    )
    return f"{type(error).__name__}: {lines[0]}{full}"
