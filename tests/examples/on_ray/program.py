"""rl_loop.py, whose driver waits after some iterations until a test lets it go on. Run as a program; see runs.py.

HOLD names a folder, in which an empty file `after-N` says that the driver is to wait after iteration N. It adds the
file `held-N`, and goes on when `after-N` is gone. So no run ends before a test has seen or killed what it wants.
"""

import os
import pathlib
import time

import rl.report
import rl_loop

FOLDER = pathlib.Path(os.environ["HOLD"])


class Held(rl.report.Progress):
    """Shows an iteration, and waits."""

    def show(self, record):
        super().show(record)
        version = record["version"]
        while (FOLDER / f"after-{version}").exists():
            (FOLDER / f"held-{version}").touch()
            time.sleep(0.01)


def main():
    """Ray gives itself 30 seconds to start, which a busy machine may not have for it."""
    for _ in range(9):
        try:
            return rl_loop.main()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            import ray

            ray.shutdown()
    return rl_loop.main()


rl.report.Progress = Held
main()
