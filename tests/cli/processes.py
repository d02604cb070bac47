"""The command in a process of its own, as a shell starts it."""

import shlex
import subprocess
import sys

from tests.helpers import python_environment

ENTRY = "import sys, jaxlowprec_command; sys.exit(jaxlowprec_command.main())"


def command(*arguments, before="", after="", **variables):
    """(status, output, error) of a shell's line.

    Arguments:
        arguments: of `jaxlowprec`.
        before: other commands, such as limits of the system's.
        after: where the streams go.
        variables: of the environment.
    """
    words = shlex.join([sys.executable, "-c", ENTRY, *map(str, arguments)])
    done = subprocess.run(
        ["sh", "-c", f"{before}\n{words} {after}"],
        env=python_environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def one_line(status, out, err):
    """The error's one line."""
    assert status == 2 and not out and err.count("\n") == 1, (status, out, err)
    return err
