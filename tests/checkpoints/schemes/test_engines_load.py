"""A converted model for images and text, loaded by transformers with compressed-tensors: the weights are ours."""

import json

import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import convert, dequantize

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


def save_model(path):
    text = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    model = transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return model


def load(path, **options):
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16, **options)
    return dict(model.named_parameters())


@pytest.mark.parametrize("name", ["w4a16", "w4a16_asym"])
def test_a_nested_text_model_loads_to_the_same_bits(tmp_path, name):
    original = dict(save_model(tmp_path / "high").named_parameters())
    report = convert(tmp_path / "high", tmp_path / "low", schemes.by_name(name, group_size=32))
    assert len(report.changed) == 14 and not [m for m in report.changed if "vision" in m or "projector" in m]
    assert "quantization_config" in json.loads((tmp_path / "low" / "config.json").read_text())["text_config"]
    dequantize(tmp_path / "low", tmp_path / "back")
    decoded = load(tmp_path / "low", quantization_config=transformers.CompressedTensorsConfig(run_compressed=False))
    ours = load(tmp_path / "back")
    assert set(decoded) == set(ours) == set(original)
    assert [n for n in ours if not torch.equal(ours[n], decoded[n])] == []
    assert sum(not torch.equal(ours[n], original[n]) for n in ours) == len(report.changed)
