"""One thread a process: the tests run as many processes as there are cores (pytest-xdist), and so do the programs that they start."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
