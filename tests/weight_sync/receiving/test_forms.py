"""What engines hold, and that it says which bytes were sent."""

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints.conversion.rules import DEFAULTS, Rules
from jaxlowprec.checkpoints.schemes import by_name, marlin
from jaxlowprec.checkpoints.schemes.gptq import GPTQ
from jaxlowprec.weight_sync import InProcess, Receiver, Refused, WeightSource, differences, push
from jaxlowprec.weight_sync.bucket import entry_of, pack
from jaxlowprec.weight_sync.manifest import Manifest, described
from tests.checkpoints.weights import INT4, SCHEMES, weight
from tests.weight_sync.trees import MAPPING, llama

RULES = Rules(defaults=DEFAULTS)
INT4_SCHEMES = {name: scheme for name, scheme in SCHEMES.items() if scheme.name in INT4}
UP = "model.layers.1.mlp.up_proj"


def source(scheme):
    return WeightSource(llama(), MAPPING, scheme, quantize=RULES)


def received(source, form, **options):
    receiver = Receiver(form=form, **options)
    push(source, InProcess(receiver))
    return receiver


def send_module(receiver, tensors, scheme, version=1, buckets=1):
    """Tensors of a module "m", as a version of its own, in one bucket or more."""
    named = [(f"m.{name}", tensor) for name, tensor in tensors.items()]
    manifest = Manifest(tuple(entry_of(*one) for one in named), described(scheme))
    receiver.pause(1)
    try:
        receiver.begin(version, manifest)
        size = -(-len(named) // buckets)
        for i in range(buckets):
            receiver.receive(pack(version, i, i == buckets - 1, dict(named[i * size : (i + 1) * size])))
        receiver.commit(version, manifest.hash)
    finally:
        receiver.resume()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("form", ["published", "plain"])
def test_a_dump_is_what_was_sent(scheme, form):
    sent = source(scheme)
    assert differences(sent, received(sent, form)) == []


@pytest.mark.parametrize("scheme", INT4_SCHEMES.values(), ids=INT4_SCHEMES)
@pytest.mark.parametrize("form", ["gptq", "marlin"])
def test_a_dump_of_an_engines_layout_is_what_was_sent(scheme, form):
    sent = source(scheme)
    assert differences(sent, received(sent, form)) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_dump_of_extreme_values_is_what_was_sent(scheme, dtype):
    tensors = scheme.compress(weight((128, 256)))
    receiver = Receiver(form="plain", dtype=dtype)
    send_module(receiver, tensors, scheme)
    dumped = receiver.dump()
    assert {name: t.tobytes() for name, t in dumped.items()} == {f"m.{n}": t.tobytes() for n, t in tensors.items()}


def test_codes_under_a_zero_scale_are_dumped():
    scheme = by_name("w4a16", group_size=32)
    tensors = dict(scheme.compress(weight((16, 64))))
    tensors["weight_scale"] = np.zeros_like(tensors["weight_scale"])
    receiver = Receiver(form="plain")
    send_module(receiver, tensors, scheme)
    assert not receiver.weights["m.weight"].astype(np.float32).any()
    assert receiver.dump()["m.weight_packed"].tobytes() == tensors["weight_packed"].tobytes()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_plain_weights_are_what_a_reader_of_the_format_computes(scheme):
    sent = source(scheme)
    live = received(sent, "plain").weights
    parts = {name.removeprefix(f"{UP}."): t for name, t in sent.arrays() if name.startswith(f"{UP}.")}
    assert live[f"{UP}.weight"].dtype == ml_dtypes.bfloat16
    assert live[f"{UP}.weight"].tobytes() == scheme.decompress(parts).tobytes()
    assert not [name for name in live if name.rpartition(".")[2] in parts and not name.endswith(".weight")]


@pytest.mark.parametrize("symmetric", [True, False])
def test_marlin_weights_are_those_of_gptqs_file_repacked(symmetric):
    sent = source(by_name("w4a16" if symmetric else "w4a16_asym"))
    gptq, live = received(sent, "gptq").weights, received(sent, "marlin").weights
    plain = received(sent, "plain").weights
    file = {part: gptq[f"{UP}.{part}"] for part in GPTQ.required}
    read = by_name("gptq", symmetric=symmetric, version=1 if symmetric else 2, scale_dtype="bfloat16")
    assert read.decompress(file).tobytes() == plain[f"{UP}.weight"].tobytes()
    assert (live[f"{UP}.qweight"] == marlin.repack(file["qweight"])).all()
    assert (live[f"{UP}.scales"] == marlin.permute_scale(file["scales"], 128, 128)).all()
    assert (f"{UP}.qzeros" in live) != symmetric
    bias = "model.layers.1.self_attn.q_proj.bias"
    assert (live[bias] == marlin.permute_bias(plain[bias])).all() and (live[bias] != plain[bias]).any()


@pytest.mark.parametrize("form", ["plain", "gptq", "marlin"])
def test_a_changed_live_weight_shows_in_the_dump(form):
    sent = source(by_name("w4a16"))
    receiver = received(sent, form)
    name = f"{UP}.weight" if form == "plain" else f"{UP}.qweight"
    array = receiver.weights[name]
    array.flags.writeable = True
    array.view(f"u{array.dtype.itemsize}")[3, 3] ^= 0x40 if form != "plain" else 0x8000
    assert differences(sent, receiver) == [f"{UP}.weight_packed"]


@pytest.mark.parametrize(
    ("scheme", "shape", "form", "reason"),
    [
        ("nvfp4", (128, 256), "gptq", "in form 'gptq': nvfp4 holds no 4-bit integers"),
        (
            "w4a16",
            (96, 256),
            "marlin",
            "version 2 cannot be decoded: m: Marlin's kernel cannot take it: N=96 is not a multiple of 64",
        ),
        ("w4a16", (12, 256), "gptq", "version 2 cannot be decoded: m: gptq.store: .*multiples of 8"),
    ],
)
def test_what_a_form_cannot_hold_refuses_the_commit(scheme, shape, form, reason):
    receiver = Receiver(form=form)
    good = by_name("w4a16")
    send_module(receiver, good.compress(weight((128, 256))), good)
    before = receiver.weights
    with pytest.raises(Refused, match=reason):
        send_module(receiver, by_name(scheme).compress(weight(shape)), by_name(scheme), version=2)
    assert receiver.weights is before and receiver.state == "serving"


def test_a_module_that_is_split_over_buckets_refuses_the_commit():
    scheme = by_name("w4a16")
    with pytest.raises(Refused, match="m: .*weight_shape are missing"):
        send_module(Receiver(form="plain"), scheme.compress(weight((128, 256))), scheme, buckets=2)


@pytest.mark.parametrize("scheme", [{"name": "w3a16"}, {"name": "w4a16", "bits": 3}])
def test_a_scheme_that_nobody_knows_is_refused_at_once(scheme):
    receiver = Receiver(form="plain")
    receiver.pause(1)
    with pytest.raises(Refused, match="begin: version 1, in form 'plain'"):
        receiver.begin(1, Manifest((), scheme))


def test_an_unknown_form_is_an_error():
    with pytest.raises(ValueError, match="form='exl2'; needs one of published, plain, gptq, marlin"):
        Receiver(form="exl2")
