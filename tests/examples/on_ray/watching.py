"""Asks the workers of a run what they serve, again and again. Run as a program; see test_kills.

    python -m tests.examples.on_ray.watching FOLDER

FOLDER is the run's folder for temporary files. Each answer is a line of JSON. Ends when its standard input does.
"""

import contextlib
import json
import os
import pathlib
import sys
import threading

from rl.on_ray.cluster import private_variables

INTERVAL = 0.05


class Watch(threading.Thread):
    """Prints what a worker serves until it is told to stop."""

    writing = threading.Lock()
    stopped = threading.Event()

    def __init__(self, worker):
        super().__init__()
        self._worker = worker

    def run(self):
        while not self.stopped.wait(INTERVAL):
            with contextlib.suppress(ray.exceptions.RayError):  # it is dead, or has no version yet
                serving = ray.get(self._worker.serving.remote(), timeout=10)
                seen = {"version": serving.version, "digest": digest_of(serving.digests), "state": serving.state}
                with self.writing:
                    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    (private,) = pathlib.Path(sys.argv[1]).glob("rl_*")
    (port,) = private.glob("ray/session_latest/gcs_server_port_*")
    os.environ |= private_variables(private / "token")
    import ray  # which reads these variables when it is imported
    from rl.on_ray.worker import digest_of

    ray.init(address=f"127.0.0.1:{port.read_text()}", logging_level="ERROR", log_to_driver=False)
    watches = [Watch(ray.get_actor(**actor)) for actor in ray.util.list_named_actors(all_namespaces=True)]
    for watch in watches:
        watch.start()
    sys.stdin.read()
    Watch.stopped.set()
    for watch in watches:
        watch.join()
