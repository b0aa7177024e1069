"""What the keys of VOXTRAL_SERVE_KEYS use, counted over all API processes of a server.

The processes share an SQLite file: a limit of two sessions is two, however many processes there are. Each process
writes its own rows of what is held and clears them at its start; the audio of a key is one row. A call takes tens of
microseconds. With one process, the database is in memory.
"""

import os
import sqlite3
import time
from pathlib import Path

MEMORY = ":memory:"
# vLLM sets it for several API processes, to a directory of the server's that it removes at the end.
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
TABLES = (
    "CREATE TABLE IF NOT EXISTS held (name TEXT, what TEXT, process INTEGER, number INTEGER NOT NULL, "
    "PRIMARY KEY (name, what, process))",
    # `used` seconds at the time `at`, of time.monotonic(), which is the same in all processes of a machine
    "CREATE TABLE IF NOT EXISTS audio (name TEXT PRIMARY KEY, used REAL NOT NULL, at REAL NOT NULL)",
)
ROUNDING_S = 1e-6


def shared_file(processes: int) -> str:
    """The database of a server with so many API processes. Raises KeyError if vLLM has named no directory."""
    if processes == 1:
        return MEMORY
    return str(Path(os.environ[DIRECTORY]) / f"voxtral_serve_keys_{os.getppid()}.sqlite")


class Usage:
    """`what` is the name of a limit on what is held at a time. To be used by one thread at a time."""

    def __init__(self, file: str = MEMORY, process: int = 0) -> None:
        """`process` is the number of this API process."""
        self._process = process
        # Its statements begin and end transactions.
        self._database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        for statement in ("PRAGMA journal_mode = MEMORY", "PRAGMA synchronous = OFF", *TABLES):
            self._database.execute(statement)
        # A directory that the user has set may have the file of a former server.
        self._database.execute("DELETE FROM held WHERE process = ?", (process,))
        if process == 0:
            self._database.execute("DELETE FROM audio")

    def close(self) -> None:
        self._database.close()

    def held(self, name: str, what: str) -> int:
        """How many the key holds, in all processes."""
        query = "SELECT COALESCE(SUM(number), 0) FROM held WHERE name = ? AND what = ?"
        return int(self._database.execute(query, (name, what)).fetchone()[0])

    def take(self, name: str, what: str, most: int | None) -> bool:
        """Hold one more, unless the key has `most`."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            if most is not None and self.held(name, what) >= most:
                return False
            self._database.execute(
                "INSERT INTO held VALUES (?, ?, ?, 1) ON CONFLICT DO UPDATE SET number = number + 1",
                (name, what, self._process),
            )
        return True

    def give(self, name: str, what: str) -> None:
        """Hold one less."""
        where = (name, what, self._process)
        self._database.execute("UPDATE held SET number = number - 1 WHERE name = ? AND what = ? AND process = ?", where)

    def wait_s(self, name: str, seconds: float, a_minute: int, now: float | None = None) -> float:
        """Seconds until the key may send so many seconds of audio: 0 if it may now."""
        now = time.monotonic() if now is None else now
        return max(0.0, self._used(name, a_minute, now) + seconds - a_minute - ROUNDING_S) * 60 / a_minute

    def spend(
        self, name: str, seconds: float, a_minute: int, *, anyway: bool = False, now: float | None = None
    ) -> float:
        """Count seconds of audio, unless they are more than is left: as wait_s. `anyway`: in any case."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            now = time.monotonic() if now is None else now  # not before the wait for another process
            wait_s = self.wait_s(name, seconds, a_minute, now)
            if wait_s == 0 or anyway:
                used = self._used(name, a_minute, now) + seconds
                self._database.execute("INSERT OR REPLACE INTO audio VALUES (?, ?, ?)", (name, used, now))
        return wait_s

    def _used(self, name: str, a_minute: int, now: float) -> float:
        row = self._database.execute("SELECT used, at FROM audio WHERE name = ?", (name,)).fetchone()
        return max(0.0, float(row[0]) - max(0.0, now - row[1]) * a_minute / 60) if row is not None else 0.0
