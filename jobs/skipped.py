"""Write the batch of a step whose update was skipped to a file."""

from __future__ import annotations

import json
from pathlib import Path

from common.files import on_disk, write_whole
from data.types import Example


def write_batch(path: Path, batch: list[Example]) -> str:
    """Write the rows of a batch as token ids, one example per line, for replay.

    Returns a sentence that names the file, or the reason why it could not be written."""
    lines = [
        json.dumps(
            {
                "prompt_id": e.prompt_id,
                "label": e.label,
                "rows": [
                    {"prompt_ids": r.prompt_ids.tolist(), "completion_ids": r.completion_ids.tolist()}
                    | ({} if r.loss_mask is None else {"loss_mask": r.loss_mask.tolist()})
                    for r in e.rows
                ],
            }
        )
        for e in batch
    ]
    try:
        write_whole(path, "\n".join(lines) + "\n")
    except OSError as error:
        return f"the batch could not be written to {path} ({error}) {on_disk(path)}"
    return f"the batch is in {path}"
