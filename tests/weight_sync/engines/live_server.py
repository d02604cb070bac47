"""A server in a process of its own, for the time of a test."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time
import urllib.error
import urllib.request


def environment(**added):
    """The variables of a server's process: without those that are about this library's own environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_", "VIRTUAL_ENV"))}
    return kept | added


class LiveServer:
    """A server, and the end of what it wrote."""

    def __init__(self, url, log):
        self.url, self._log = url, log

    def call(self, path, body=None, timeout=600):
        """The object that it answers to a POST, or a GET without a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"null")

    def output(self):
        """The end of what it wrote."""
        return self._log.read_text()[-4000:]


@contextlib.contextmanager
def running(command, variables, server):
    """Starts the command and waits until the server is healthy; ends it and its children after the block."""
    with server._log.open("w") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    # An engine's processes wait busily. On two cores they would leave the test nothing for as long as they generate.
    with contextlib.suppress(OSError):
        pathlib.Path(f"/proc/{process.pid}/autogroup").write_text("10")
    try:
        _wait(server, process)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _wait(server, process, seconds=900):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, server.output()
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(server.url + "/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise AssertionError(f"the server did not start within {seconds} s: {server.output()}")
