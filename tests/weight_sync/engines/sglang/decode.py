"""Runs in SGLang's environment: decode.py FILES. Each has the body of a request to `/update_weights_from_tensor`.

SGLang's own request model, unpickler and bucket read it, and another process than the one that wrote it. Prints a line
of JSON for each body: for each payload the tensors, [name, dtype, shape, bytes in hexadecimal digits].
"""

import json
import pathlib
import sys

import pydantic
import torch
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket


def described(name, tensor):
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return name, str(tensor.dtype), list(tensor.shape), content.hex()


def tensors(payload):
    content = MultiprocessingSerializer.deserialize(payload)
    bucket = FlattenedTensorBucket(flattened_tensor=content["flattened_tensor"], metadata=content["metadata"])
    return [described(name, tensor) for name, tensor in bucket.reconstruct_tensors()]


for path in sys.argv[1:]:
    body = json.loads(pathlib.Path(path).read_text())
    request = pydantic.TypeAdapter(UpdateWeightsFromTensorReqInput).validate_python(body)
    assert request.load_format == "flattened_bucket" and not request.abort_all_requests
    assert {name: getattr(request, name) for name in body if name != "serialized_named_tensors"} == {
        name: value for name, value in body.items() if name != "serialized_named_tensors"
    }
    payloads = normalize_serialized_named_tensor_payloads(request.serialized_named_tensors)
    print(json.dumps([tensors(payload) for payload in payloads]))
