"""Ports for servers that processes of the tests will start."""

import itertools
import os
import socket

JOB_PORTS = 61_440, 4096
"""JAX makes a coordinator's port of a Slurm job's number, modulo 4096: the first one, and their number."""


def _ports(first, count):
    """The ports of a range, each once and in turn; where this process begins differs from its neighbours'."""
    begin = os.getpid() * 61
    yield from (first + (begin + n) % count for n in itertools.count())


def _free(ports):
    """The next of these ports on which nothing listens.

    No system gives ports from 20000 to 30000, or above 61000, to those who ask for any: nothing takes a port between
    this check and its use.
    """
    for port in ports:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("there is no end of ports")


_ANY, _OF_JOBS = _ports(20_000, 10_000), _ports(*JOB_PORTS)


def free_port():
    """A port at which nobody listens."""
    return _free(_ANY)


def free_job():
    """The number of a Slurm job whose coordinator's port is free."""
    return _free(_OF_JOBS) - JOB_PORTS[0]
