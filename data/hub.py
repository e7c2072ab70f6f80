"""Rows of data sets on the Hugging Face hub, read by the ``datasets`` library."""

from __future__ import annotations

from collections.abc import Iterator

from common.errors import ConfigError
from data.rows import Dropped, Row, class_names, table_rows


def hub_rows(
    path: str, split: str, *, subset: str | None, data_dir: str | None, revision: str | None
) -> Iterator[Row | Dropped]:
    """Stream the rows of one split. Raises ConfigError if the hub has no such data set, subset or split, or
    cannot be reached."""
    import datasets  # imported here: the import takes a second, and local files do not need it

    try:
        table = datasets.load_dataset(path, name=subset, split=split, data_dir=data_dir, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _refusal(path, split, subset, str(error)) from error
    # reading by Arrow's batches is several times as fast as row by row
    parts = table.with_format("arrow").iter(batch_size=1000)
    yield from table_rows(path, parts, class_names(table.features))


def _refusal(path: str, split: str, subset: str | None, message: str) -> ConfigError:
    first_line = message.strip().splitlines()[0] if message.strip() else "no reason given"
    if "scripts are no longer supported" in message:
        return ConfigError(
            "data.path",
            path,
            "is made by a script, which the datasets library no longer runs; "
            "download its data file and use data=local data.path=FILE",
        )
    if "Unknown split" in message:
        return ConfigError("data.split", split, f"{path} has no such split: {first_line}")
    if "BuilderConfig" in message or "Config name is missing" in message:
        return ConfigError("data.subset", subset, f"{path}: {first_line}")
    return ConfigError(
        "data.path",
        path,
        f"cannot be loaded ({first_line}); use org/name of a public data set, or data=local with a file",
    )
