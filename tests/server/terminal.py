"""Runs a command on a terminal of its own."""

import os
import pty
import select
import subprocess
import time


def shown_on_terminal(command, until, stop, **options):
    """Run a command, send it the signal `stop` once it has shown `until` (bytes), and return all that it showed."""
    main_end, terminal = pty.openpty()
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, **options) as running:
        os.close(terminal)
        shown, end = b"", time.monotonic() + 60
        while until not in shown and time.monotonic() < end:
            if select.select([main_end], [], [], 0.1)[0]:
                shown += os.read(main_end, 65536)
        running.send_signal(stop)
        while True:
            try:
                shown += os.read(main_end, 65536)
            except OSError:  # the other end is closed
                break
        assert running.wait(20) == 0
    os.close(main_end)
    return shown.decode()
