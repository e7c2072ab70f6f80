"""Says what took the place of ``python -m study``."""

from config.removed import refuse_command

refuse_command()
