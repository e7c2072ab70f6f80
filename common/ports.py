"""Find a TCP port that a program can listen on some seconds later.

The port that ``bind`` finds for the number 0 is one of those that Linux also gives to outgoing connections. A
program that needs a minute to listen there, as a vLLM server does, may find that it was given away. The ports
below that range go only to programs that ask for them by number.
"""

import random
import socket

PORTS = range(10_000, 32_768)
"""Above those of well-known services, below those that Linux gives to outgoing connections."""


def free_port() -> int:
    """Return a port of PORTS that nothing listens on at present. Of two programs that ask at once, both may
    get the same, once in thousands. Raises OSError if there is none."""
    for port in random.SystemRandom().choices(PORTS, k=1000):  # leaves the seeded generator alone
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} of this machine is free")
