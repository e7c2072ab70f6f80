"""A rank that marks and waits for the others, step after step, until a file says stop. A rank without
a sign of life for SECONDS is named, long before one that is behind.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 TORCHELASTIC_RUN_ID=x \\
    python -m tests.distributed.stepping SECONDS STOP
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from models import watchdog
from models.distributed import any_rank, start, stop


def main(seconds: float, until: Path) -> None:
    world, step = start(), 0
    watchdog.INTERVAL = seconds / 4
    of_ranks = watchdog.Watchdog(world, 300.0)
    print("started", flush=True)
    while not any_rank(until.exists()):
        step += 1
        of_ranks.mark(f"step {step}, under way")
        time.sleep(0.01)
    of_ranks.close()
    stop()


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
