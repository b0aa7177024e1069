"""Debian's Firefox, driven by WebDriver BiDi (https://w3c.github.io/webdriver-bidi/) over a WebSocket.

Playwright drives a Firefox of its own build only, and Debian has no geckodriver.
"""

import contextlib
import itertools
import json
import queue
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from websockets.sync.client import connect

MISSING = "no Firefox: install Debian's `firefox-esr`"
START_S, PATIENCE_S = 120.0, 120.0
# No requests of its own, and audio that plays without a click
PREFERENCES = {
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "media.autoplay.default": 0,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,",
    "toolkit.telemetry.enabled": False,
}


class Firefox:
    """One window with one page, with a profile in an empty `folder`. A context manager.

    The test is skipped, as not run, where there is no Firefox.
    """

    def __init__(self, folder: Path) -> None:
        path = shutil.which("firefox-esr") or shutil.which("firefox")
        if path is None:
            pytest.skip(f"not run: {MISSING}")
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in PREFERENCES.items()]
        (folder / "user.js").write_text("".join(lines))
        self.command = [path, "--headless", "--no-remote", "--profile", str(folder), "--remote-debugging-port", "0"]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.stack = contextlib.ExitStack()
        self.stack.callback(self._end)
        try:
            self.socket = self.stack.enter_context(connect(f"{self._address()}/session", max_size=None))
            self.numbers = itertools.count(1)
            self.ask("session.new", capabilities={})
            self.context = self.ask("browsingContext.getTree")["contexts"][0]["context"]
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.close()

    def _end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)

    def _address(self) -> str:
        """Of the WebSocket that Firefox names on stderr, which is read to its end in a thread."""
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                lines.put(line)

        threading.Thread(target=read, daemon=True).start()
        until = time.monotonic() + START_S
        while True:
            line = lines.get(timeout=max(until - time.monotonic(), 0.1))
            if found := re.search(r"WebDriver BiDi listening on (ws://\S+)", line):
                return found[1]

    def ask(self, method: str, **params: Any) -> Any:
        """The result of a command. Raises AssertionError with Firefox's message if it fails."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=PATIENCE_S))
            if answer.get("id") == number:
                assert answer["type"] == "success", answer
                return answer["result"]

    def visit(self, url: str) -> None:
        self.ask("browsingContext.navigate", context=self.context, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression: a string, a number, a boolean, or None."""
        target = {"context": self.context}
        found = self.ask("script.evaluate", expression=expression, target=target, awaitPromise=True)
        assert found["type"] == "success", found
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression, once it is one that counts as true. Raises TimeoutError."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.2)
        raise TimeoutError(f"{expression} is still {value!r}")

    def choose(self, selector: str, *files: Path) -> None:
        """Have these files in an <input type="file">."""
        locator = {"type": "css", "value": selector}
        (node,) = self.ask("browsingContext.locateNodes", context=self.context, locator=locator)["nodes"]
        element = {"sharedId": node["sharedId"]}
        self.ask("input.setFiles", context=self.context, element=element, files=[str(file) for file in files])
