"""Reading of a checkpoint's shards as data, so that nothing in its files is executed, whoever made them.

torch.distributed.checkpoint unpickles its table of contents (``.metadata``), and every value that is not a
tensor, without restriction. Here the table may consist only of that library's own records and of plain
values, and other values are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint._nested_dict import set_element

RECORDS: dict[tuple[str, str], Any] = {
    **{
        (records.__name__, name): getattr(records, name)
        for name in (
            *("Metadata", "BytesStorageMetadata", "TensorStorageMetadata", "ChunkStorageMetadata"),
            *("MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    },
    (torch_files.__name__, "_StorageInfo"): torch_files._StorageInfo,
}
"""(module, name) -> the record type; a table of contents consists of these."""
ALLOWED: dict[tuple[str, str], Any] = {
    **RECORDS,
    **{("torch", str(d).removeprefix("torch.")): d for d in vars(torch).values() if type(d) is torch.dtype},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): lambda kind, name: records._MEM_FORMAT_ENCODING[name],  # before Python 3.11.4
}
"""(module, name) that a table may ask for, but for paths, which nobody reads -> the object that it gets."""


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
        if type(self.stack[-2]) not in RECORDS.values():  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes something that is no record")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class Reader(FileSystemReader):
    """Reader of one checkpoint's shards, with a table of contents that was read as data."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError, here and not below torch, which prints it and looks for other tables."""
        super().__init__(path)
        try:
            with (path / ".metadata").open("rb") as stream:
                self._table: records.Metadata = _Unpickler(stream).load()
            for place in self._table.storage_data.values():
                if Path(place.relative_path).name != place.relative_path:
                    raise ValueError(f"{place.relative_path} is outside the checkpoint")
            self._table.storage_meta = records.StorageMeta(load_id=self.load_id)
        except Exception as error:  # an untrusted pickle may make its reader raise anything
            raise ValueError(f".metadata is no table of contents ({error}); nothing of it was run") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> records.Metadata:
        """Return the one table, never a table of a single rank: no checkpoint of this project has one."""
        return self._table


class Planner(DefaultLoadPlanner):
    """Load planner that reads values other than tensors (the optimizer's settings) as plain data."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
