"""Runs a command that must not outlive the process that started this one, however that ends. Standard library only.

python leash.py REPORTS GRACE_S COMMAND...    with a pipe as stdin, and a session of its own

The other end of stdin closes when the parent process ends, also by SIGKILL. Then, or when the command ends by itself,
all processes of the session get SIGTERM, and SIGKILL after GRACE_S seconds. REPORTS is a file descriptor for two lines:
the command's process id, and its exit status (negative for a signal). It closes when all processes have ended; at once
if the command cannot be started.

The command is a child of a process that is no child of the parent: a Ray worker that ends kills its children, and
nobody would be left to end the command.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

POLL_S = 0.1
KILLED_S = 5  # in which processes end after SIGKILL


def main() -> None:
    reports, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup: the command ignores it as well
            signal.signal(number, lambda *_: None)  # the command has the default: exec resets handlers
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    report(reports, process.pid)
    while process.poll() is None and not select.select([0], [], [], POLL_S)[0]:
        pass
    if process.returncode is None:
        end_session(process, grace_s)
        report(reports, process.wait())
    else:
        report(reports, process.returncode)
        end_session(process, grace_s)


def report(reports: int, number: int) -> None:
    """Write a line to the parent. One that has ended, which closes the pipe, must not end this process as well."""
    with contextlib.suppress(BrokenPipeError):
        os.write(reports, f"{number}\n".encode())


def end_session(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """SIGTERM to the command and all other processes of this session; SIGKILL to those left after `grace_s`."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_S)):
        told: set[int] = set()
        deadline = time.monotonic() + patience_s
        while (left := running(process)) and time.monotonic() < deadline:
            for pid in left - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= left
            time.sleep(POLL_S)


def running(process: "subprocess.Popen[bytes]") -> set[int]:
    """The processes of this session that have not ended, without this one. Without /proc, the command alone.

    Zombies are not counted: a container without an init process keeps them.
    """
    pids = {process.pid} if process.poll() is None else set()
    if not os.path.isdir("/proc/self"):
        return pids
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(name) != os.getpid() and os.getsid(int(name)) == os.getsid(0):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state = file.read().rpartition(b")")[2].split()[0]
                pids |= set() if state in (b"Z", b"X") else {int(name)}
    return pids


if __name__ == "__main__":
    main()
