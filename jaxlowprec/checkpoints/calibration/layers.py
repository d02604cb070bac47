"""A decoder whose layers are read from a folder, used and forgotten one after the other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.arguments import as_array
from jaxlowprec.checkpoints.conversion.modules import SingleWeights
from jaxlowprec.checkpoints.decoders import mapping_of, require_counts
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.models.decoder.attention import Parts
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.models.decoder.model import Decoder, Layer, log_probabilities
from jaxlowprec.telemetry.scopes import Inputs, SecondMoments, entered

_DTYPE = jnp.dtype(jnp.float32)


class LayerSource:
    """Reads the parts of a decoder, in float32. Experts may be in arrays that hold all experts of a layer.

    Arguments:
        source: a folder in high precision.
        config: its config.
    """

    def __init__(self, source: CheckpointFolder, config: DecoderConfig):
        self.config, self._tensors, self._mapping = config, SingleWeights(source), mapping_of(config)
        self._decoder = nnx.eval_shape(lambda: Decoder(config, dtype=_DTYPE, param_dtype=_DTYPE, rngs=nnx.Rngs(0)))
        self._state = nnx.to_flat_state(nnx.state(self._decoder))

    def ends(self) -> Decoder:
        """The decoder without its layers."""
        state = nnx.from_flat_state({path: leaf for path, leaf in self._state if path[0] != "layers"})
        names = [name for name in self._tensors.names if not name.startswith("model.layers.")]
        decoder = nnx.merge(*nnx.split(self._decoder))
        decoder.layers = nnx.List([])
        nnx.update(decoder, self._mapping.from_tensors({n: self.read(n) for n in names}, state))
        return decoder

    def layer(self, number: int, instead: Mapping[str, np.ndarray]) -> LoadedLayer:
        """A layer, with other weights for some of its tensors."""
        prefix = self.prefix(number)
        names = [name for name in self._tensors.names if name.startswith(prefix)]
        tensors = {name: instead[name] if name in instead else self.read(name) for name in names}
        filled = self._mapping.from_tensors(tensors, self._part(number))
        state = nnx.from_flat_state({path[2:]: leaf for path, leaf in nnx.to_flat_state(filled)})
        return LoadedLayer(self._graph(number), state, self.config, number)

    def read(self, name: str) -> np.ndarray:
        """A tensor; experts in one array have a name for each matrix of each expert."""
        return self._tensors.read(name)

    def prefix(self, number: int) -> str:
        """The prefix of the names of a layer's tensors."""
        return f"model.layers.{number}."

    def inputs_of(self, number: int) -> dict[str, str]:
        """The path of a linear that reads the inputs of each weight of a layer, by the weight's name.

        Names of experts' weights have `{expert}` in them.
        """
        found: dict[str, str] = {}
        for path, names in self._mapping.names(self._part(number)).items():
            linear, dot, last = path.removeprefix(f"layers.{number}.").rpartition(".")
            for name in names.split(", ") if last == "kernel" else ():
                found.setdefault(name, linear.replace(".", "/"))
        return found

    def _part(self, number: int) -> Any:
        return nnx.from_flat_state({path: leaf for path, leaf in self._state if path[:2] == ("layers", number)})

    @functools.cache  # noqa: B019 (the source lives as long as the conversion)
    def _graph(self, number: int) -> Any:
        """The graph of a layer without parameters: equal for layers of one kind, so that these are compiled once."""

        def named() -> Layer:
            layer = Layer(Parts(self.config, _DTYPE, _DTYPE, nnx.Rngs(0)), number)
            jlp.nnx.name_layers(layer)
            return layer

        return nnx.split(nnx.eval_shape(named))[0]


class LoadedLayer:
    """A layer with its parameters."""

    def __init__(self, graph: Any, state: Any, config: DecoderConfig, number: int):
        self._graph, self._state, self._config, self._rope = graph, state, config, config.rope_of(number)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Activations [batch, time, width] behind the layer."""
        return np.asarray(_computed(self._graph, self._config, self._rope, False, self._state, x)[0])

    def watched(self, x: np.ndarray) -> tuple[np.ndarray, dict[str, Inputs]]:
        """The layer's result, and the inputs of its linears by their paths in the layer."""
        y, found = _computed(self._graph, self._config, self._rope, True, self._state, x)
        return np.asarray(y), jax.device_get(found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _computed(
    graph: Any, config: DecoderConfig, rope: Any, watch: bool, state: Any, x: jax.Array
) -> tuple[jax.Array, dict[str, Inputs]]:
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    tables = rope.tables(positions, config.turned, x.shape[1])
    scope = SecondMoments()
    with entered(scope) if watch else contextlib.nullcontext():
        y, _, _ = nnx.merge(graph, state)(x, positions, tables, None)
    return y, scope.inputs


def negative_log_likelihood(ends: Decoder, hidden: np.ndarray, targets: np.ndarray) -> float:
    """The mean of predicting tokens [rows, time] from what the last layer gives [rows, time, width]."""
    graph, state = nnx.split(ends)
    return float(np.mean([_of_row(graph, state, row, tokens) for row, tokens in zip(hidden, targets, strict=True)]))


@functools.partial(jax.jit, static_argnums=0)
def _of_row(graph: Any, state: Any, row: jax.Array, tokens: jax.Array) -> jax.Array:
    decoder = nnx.merge(graph, state)
    return -log_probabilities(decoder.logits(decoder.norm(row)), tokens).mean()


def embedded(ends: Decoder, tokens: np.ndarray) -> np.ndarray:
    """The first layer's input for tokens [rows, time]: [rows, time, width]."""
    return np.asarray(ends.embedded(as_array(tokens)))


def batches(rows: np.ndarray, tokens: int = 2048) -> Iterator[slice]:
    """Rows [rows, time, ...] some at a time, all of one number but for the last."""
    step = max(1, tokens // rows.shape[1])
    return (slice(begin, begin + step) for begin in range(0, len(rows), step))


def config_of(source: CheckpointFolder) -> DecoderConfig:
    """The config of a folder that can be calibrated.

    Raises:
        CheckpointError: the decoder does not have the model's architecture, or the folder not the tensors for it.
    """
    try:
        config = DecoderConfig.of(source.config(), str(source.path / "config.json"))
        require_counts(source, config)
        return config
    except ValueError as error:
        raise CheckpointError(f"calibration computes the model, by models.decoder: {error}") from None
