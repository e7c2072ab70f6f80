"""Reading of a checkpoint's shards as data, so that nothing in its files is executed, whoever made them.

torch.distributed.checkpoint unpickles its table of contents (``.metadata``), and every value that is not a
tensor, without restriction. Here the table may consist only of that library's own records and of plain
values, and other values are read by ``torch.load(weights_only=True)``.
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
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from common.errors import StoppedError
from common.files import regular_file

RECORDS: tuple[type, ...] = (
    Metadata,
    torch_metadata.BytesStorageMetadata,
    torch_metadata.TensorStorageMetadata,
    torch_metadata.ChunkStorageMetadata,
    torch_metadata.MetadataIndex,
    torch_metadata.StorageMeta,
    torch_metadata.TensorProperties,
    torch_metadata._MEM_FORMAT_ENCODING,
    torch_files._StorageInfo,
)
"""Record types that a table of contents consists of."""
ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in (*RECORDS, torch.Size)},
    **{("torch", str(d).removeprefix("torch.")): d for d in vars(torch).values() if type(d) is torch.dtype},
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    ("collections", "OrderedDict"): dict,
    # Python 3.11.0 to 3.11.3 name the member of an enumeration so.
    ("builtins", "getattr"): lambda kind, name: torch_metadata._MEM_FORMAT_ENCODING[name],
}
"""(module, name) that a table may ask for, but for paths, which nobody reads -> the object that it gets."""


class CheckpointError(StoppedError):
    """A checkpoint that could not be written, or none that can be read; the message says what and why."""


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]  # the one in C cannot refuse BUILD
    """Unpickler that builds only records and plain values."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local"):
            return lambda *parts: ""
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint has")
        return ALLOWED[module, name]

    def load_build(self) -> None:
        """Set a record's fields, never a class's, which would change it for the whole process."""
        if not isinstance(self.stack[-2], RECORDS):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes something that is no record")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def read_table(folder: Path) -> Metadata:
    """Return a checkpoint's table of contents. Raises CheckpointError for a table that does not consist of
    records and plain values, is damaged, or refers to files outside ``folder``."""
    path = folder / ".metadata"
    try:
        with regular_file(path).open("rb") as stream:
            table = _Unpickler(stream).load()
        for index, place in table.storage_data.items():
            if Path(place.relative_path).name != place.relative_path or place.transform_descriptors:
                raise ValueError(f"{index.fqn!r} is outside the checkpoint, or encoded: {place}")
    except Exception as error:  # an untrusted pickle may make its reader raise anything
        raise CheckpointError(
            f"{path} is not the table of contents of a checkpoint ({error}); nothing of it was run or loaded"
        ) from error
    return cast(Metadata, table)


class Reader(FileSystemReader):
    """Reader of one checkpoint's shards, with a table of contents that was read as data."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, here and not below torch, which prints it and looks for other tables."""
        super().__init__(path)
        self._table = read_table(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the one table, never a table of a single rank: no checkpoint of this project has one."""
        self._table.storage_meta = torch_metadata.StorageMeta(load_id=self.load_id)
        return self._table


class Planner(DefaultLoadPlanner):
    """Load planner that reads values other than tensors (the optimizer's settings) as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
