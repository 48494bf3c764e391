"""The console entry point: what must be in order before anything else is imported.

Nothing is imported here that could take long: an interrupt during the imports of `cli.main` would be a traceback.
"""

from __future__ import annotations

import errno
import gc
import os
import signal


def main() -> None:
    """`infer`: run the command line and end the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `signals.install` has a better one
    occupy_standard_descriptors()
    # What imports and vocabularies allocate stays: looking through it again and again takes a tenth of the start of a
    # small model. `session.open_model` turns collection on again.
    gc.disable()
    from infer.cli.main import main as run

    run()


def occupy_standard_descriptors() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr.

    Else the next file opened, of the cache or a session, gets that number, and what a library prints goes into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno == errno.EBADF:
                os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
