"""Runs a command that must not outlive the process that started this one, however that ends. Standard library only.

python leash.py COMMAND...    with a pipe as stdin, and a session of its own

The pipe's other end closes when the parent process ends, also by SIGKILL. Then, or when the command ends by itself, all
processes of the session end. What runs is a child of the process that was started, which exits at once: a Ray worker
that ends kills its children, and nobody would be left to end the command.
"""

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 10  # between SIGTERM and SIGKILL


def main() -> None:
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A new Popen restores no signal that is ignored.
    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    )
    threading.Thread(target=_end_with_parent, args=(process,), daemon=True).start()
    status = process.wait()
    print(f"voxtral-serve: the command ended with status {status}", flush=True)
    time.sleep(0.2)  # its children may end by themselves
    os.killpg(0, signal.SIGKILL)


def _end_with_parent(process: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    process.terminate()
    try:
        process.wait(GRACE_S)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
