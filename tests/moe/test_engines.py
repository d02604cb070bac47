"""Tapes in the forms in which vLLM and SGLang report routing: both ways, the same numbers."""

import base64
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes
from tests.moe.test_tape import EXPERTS, LAYERS, K, captured, tape_of

RoutingTape = jlp.moe.RoutingTape
SEQUENCES = [captured(6), captured(4, seed=1), captured(1)]
OPTIONS = {"num_layers": LAYERS, "dense_layers": [0]}
each_dtype = pytest.mark.parametrize("dtype", ["int32", "int16", "uint16", "uint8"])


def as_file(array):
    """vLLM's server: base64 of an .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def as_text(array):
    """SGLang: base64 of the numbers."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


class TestFromEngines:
    @each_dtype
    def test_reads_the_arrays_of_vllm(self, dtype):
        assert_same_bytes(tape_of(*(rows.astype(dtype) for rows in SEQUENCES)), tape_of(*SEQUENCES))

    @each_dtype
    def test_reads_the_files_of_vllms_server(self, dtype):
        assert_same_bytes(tape_of(*(as_file(rows.astype(dtype)) for rows in SEQUENCES)), tape_of(*SEQUENCES))
        big_endian = np.dtype(dtype).newbyteorder(">")
        assert_same_bytes(tape_of(*(as_file(rows.astype(big_endian)) for rows in SEQUENCES)), tape_of(*SEQUENCES))

    @each_dtype
    def test_reads_the_text_of_sglang(self, dtype):
        texts = [as_text(rows.astype(dtype)) for rows in SEQUENCES]
        assert_same_bytes(tape_of(*texts, bytes_dtype=dtype), tape_of(*SEQUENCES))

    def test_small_numbers_may_begin_as_a_file_does(self):
        rows = np.frombuffer(b"\x93NUMPY", np.uint8).reshape(3, 1, 2)
        options = {"num_layers": 1, "dense_layers": [], "num_experts": 256}
        tape = tape_of(rows.tobytes(), bytes_dtype="uint8", **options)
        assert_same_bytes(tape, tape_of(rows, **options))

    def test_what_the_engine_left_out_in_front_chooses_afresh(self):
        whole = tape_of(*SEQUENCES[:2])
        tape = tape_of(SEQUENCES[0][2:], SEQUENCES[1], starts=[2, 0])
        assert_same_bytes(tape.experts[:, 0, 2:], whole.experts[:, 0, 2:])
        assert_same_bytes(tape.experts[:, 1], whole.experts[:, 1])
        assert jnp.all(tape.experts[:, 0, :2] == -1)

    def test_may_be_narrow(self):
        tape = tape_of(*SEQUENCES, dtype="uint8")
        assert tape.experts.dtype == jnp.uint8
        assert_same_bytes(tape, tape_of(*SEQUENCES).astype("uint8", num_experts=EXPERTS))

    @pytest.mark.parametrize(
        ("sequence", "options", "message"),
        [
            (captured(6), {"starts": [0, 1]}, "2 starts of 1 sequences; needs one for each"),
            (captured(6), {"starts": [-1]}, "starts=-1; needs an int from 0 on"),
            (captured(6).tobytes(), {"bytes_dtype": "int64"}, "bytes_dtype='int64'; needs"),
            (captured(6).tobytes(), {"bytes_dtype": "uint8"}, r"needs \[tokens - 1, 3, 2\]|ids below|each expert once"),
            (as_file(captured(6))[:-8], {}, "an .npy file that cannot be read"),
            (as_file(captured(6)[:, :2]), {}, r"shape \(5, 2, 2\); needs"),
            (captured(6), {"dtype": "int8"}, "dtype=int8; needs int32, int16 or uint8"),
        ],
    )
    def test_what_does_not_fit_is_named(self, sequence, options, message):
        with pytest.raises(ValueError, match=f"^routed_experts: .*({message})"):
            tape_of(sequence, **options)

    def test_a_file_of_other_numbers_is_named(self):
        with pytest.raises(TypeError, match="sequence 0 is float32; needs int32"):
            tape_of(as_file(captured(6).astype(np.float32)))


class TestToEngines:
    @each_dtype
    @pytest.mark.parametrize("form", ["array", "base64", "npy"])
    def test_is_what_the_engine_gave(self, form, dtype):
        tape = tape_of(*SEQUENCES)
        found = tape.to_routed_experts(**OPTIONS, form=form, dtype=dtype)
        expected = [rows.astype(dtype) for rows in SEQUENCES]
        if form == "array":
            assert_same_bytes(found, expected)
        else:
            assert found == [{"base64": as_text, "npy": as_file}[form](rows) for rows in expected]
        assert_same_bytes(tape_of(*found, bytes_dtype="int32" if form == "npy" else dtype), tape)

    def test_of_a_narrow_tape_in_host_memory_is_the_same(self):
        tape = tape_of(*SEQUENCES)
        hosted = tape.astype("uint8", num_experts=EXPERTS).to_host()
        assert_same_bytes(hosted.to_routed_experts(**OPTIONS), tape.to_routed_experts(**OPTIONS))

    def test_has_the_tapes_layers_and_the_dense_ones(self):
        tape = tape_of(*SEQUENCES)
        assert [rows.shape for rows in tape.to_routed_experts()] == [(5, 2, K), (3, 2, K), (0, 2, K)]
        assert_same_bytes(tape.to_routed_experts(dense_layers=[0]), tape.to_routed_experts(**OPTIONS))

    def test_has_as_many_tokens_as_asked_for(self):
        recorded = RoutingTape(jnp.asarray(captured(6)[:, None, 1:].transpose(2, 1, 0, 3)))  # the last token, too
        assert [len(rows) for rows in recorded.to_routed_experts(lengths=[5])] == [4]
        assert [len(rows) for rows in recorded.to_routed_experts()] == [5]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_layers": 4}, "the tape has 2 layers and the engine 4 with experts, of num_layers=4; needs the same"),
            ({"dense_layers": [7]}, "dense_layers has 7; needs 0 to 2"),
            ({"lengths": [6, 4]}, "lengths=.*; needs 3 of at most 7 tokens"),
            ({"lengths": [6, 5, 1]}, r"layer 0, sequence 1, token 3 has experts \[-1, -1\]; needs ids from 0 on"),
            ({"form": "text"}, "form='text'; needs"),
            ({"dtype": "float32"}, "dtype='float32'; needs"),
        ],
    )
    def test_what_does_not_fit_is_named(self, options, message):
        with pytest.raises(ValueError, match=f"^to_routed_experts: .*{message}"):
            tape_of(*SEQUENCES).to_routed_experts(**options)

    def test_a_choice_within_a_sequence_is_not_left_to_the_engine(self):
        tape = RoutingTape(tape_of(captured(6)).experts.at[1, 0, 2].set(jlp.moe.AFRESH))
        with pytest.raises(ValueError, match="layer 1, sequence 0, token 2 .* engines have no number"):
            tape.to_routed_experts()

    def test_says_within_jit_that_it_cannot(self):
        with pytest.raises(TypeError, match="to_routed_experts: the tape's experts are not known within jit"):
            jax.jit(lambda tape: tape.to_routed_experts())(tape_of(*SEQUENCES))
