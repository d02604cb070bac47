"""One program in several processes: joins JAX's distributed runtime, and reports when another process is gone."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

import jax


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of jax.distributed.initialize."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed", action="store_true", help="get these options from the cluster (Slurm, Kubernetes, MPI, TPU)"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process", type=int, metavar="I", help="number of this process, 0 to N - 1")
    group.add_argument(
        "--heartbeat-timeout", type=int, default=100, help="seconds until a silent process counts as dead"
    )
    group.add_argument("--start-timeout", type=int, default=300, help="seconds to wait for all processes to start")


def check(options: argparse.Namespace) -> None:
    """Raises ValueError if the options do not fit together."""
    given = [v is not None for v in (options.coordinator, options.processes, options.process)]
    if any(given) and not all(given):
        raise ValueError("--coordinator, --processes and --process go together; on a cluster --distributed finds them")
    if options.processes is not None and not 0 <= options.process < options.processes:
        raise ValueError(f"--process {options.process}: needs 0 to {options.processes - 1}, as --processes says")
    if several(options) and not options.mesh:
        raise ValueError("several processes need --mesh, such as --mesh fsdp=N with N the number of all devices")


def several(options: argparse.Namespace) -> bool:
    """Whether this process is one of several."""
    return options.distributed or options.coordinator is not None


def start(options: argparse.Namespace, devices: int) -> None:
    """Divides a CPU into this process's share of `devices`, and joins the other processes. Call it before using JAX.

    The number of a cluster's processes is known too late for that: there, JAX_NUM_CPU_DEVICES gives the devices.
    """
    if jax.config.jax_num_cpu_devices < 0 and not options.distributed:
        jax.config.update("jax_num_cpu_devices", max(1, devices // (options.processes or 1)))
    if several(options):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                options.coordinator,
                options.processes,
                options.process,
                initialization_timeout=options.start_timeout,
                heartbeat_timeout_seconds=options.heartbeat_timeout,
                shutdown_timeout_seconds=options.heartbeat_timeout,
            )
        except ValueError as error:
            needed = "where JAX detects no cluster, give --coordinator, --processes and --process"
            raise ValueError(f"--distributed: {error} {needed}") from error


@contextlib.contextmanager
def naming_the_dead(options: argparse.Namespace) -> Iterator[None]:
    """A context that ends this process with a message if a collective fails because another process is gone.

    On a CPU that happens at once. If a collective would wait forever, JAX's heartbeat ends the process, with a message
    of its own, after --heartbeat-timeout.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        collective = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)  # outside jit a ValueError
        if not collective or not several(options):
            raise
        print(
            f"train_lm: process {jax.process_index()} of {jax.process_count()} stops: {error}\nIf a collective failed, "
            "another process most likely died or lost its connection. Start all processes again with --resume: they "
            f"go on from the latest checkpoint in {options.out}.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # an orderly exit would wait for the dead process
