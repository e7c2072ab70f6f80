"""One run, killed 20 times between a round's groups and its first step, must end like the undisturbed one.

python -m tests.integration.kills_before_steps
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

from tests.integration.online import lines
from tests.integration.test_killed_rounds import start

KILLS = 20


def main() -> None:
    rng, folder = random.Random(0), Path(tempfile.mkdtemp(prefix="kills-"))
    assert start(folder / "whole").wait() == 0
    run, done = folder / "killed" / "r", 0

    def groups(of: int) -> Path:
        return run / "rounds" / f"{of:03d}" / "groups.jsonl"

    def trained() -> int:
        return len({line["round"] for line in lines(run)}) if (run / "metrics.jsonl").exists() else 0

    while done < KILLS:
        process, of = start(folder / "killed"), trained()
        durable = groups(of).stat().st_mtime_ns if groups(of).exists() else None
        while not groups(of).exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.random() * (0.02 if durable is None else 12))
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if trained() == of:
            done += 1
            assert durable in (None, groups(of).stat().st_mtime_ns), "durable groups were made again"
            print(
                f"{done}/{KILLS}: round {of}, its groups {'new' if durable is None else 'found'}", flush=True
            )
    assert start(folder / "killed").wait() == 0
    for name in ("model/model.safetensors", *(f"rounds/{of:03d}/groups.jsonl" for of in range(3))):
        assert (run / name).read_bytes() == (folder / "whole" / "r" / name).read_bytes(), name
    print(f"{done} kills: weights and groups are the same to the byte")


if __name__ == "__main__":
    main()
