"""Ragged collectives on CPUs, which lack them."""

import jax
import jax.numpy as jnp
import pytest


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which CPUs lack. Where sizes contradict each other, rows are NaN, or bytes 127."""
    rows, begins, sizes, ends = (
        jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    me, place = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for device in range(rows.shape[0]):
        within = place - ends[device, me]
        here = (within >= 0) & (within < sizes[device, me])
        found = rows[device, jnp.where(here, begins[device, me] + within, 0)]
        wrong = jnp.asarray(jnp.nan if jnp.issubdtype(found.dtype, jnp.floating) else 0x7F, found.dtype)
        found = jnp.where(recv_sizes[device] == sizes[device, me], found, wrong)
        output = jnp.where(here[:, None], found, output)
    return output


@pytest.fixture
def ragged_on_cpus(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
