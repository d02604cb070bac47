"""The programs of the README and the documents run as they stand."""

import pathlib
import re

import jax
import pytest

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT

ROOT = pathlib.Path(__file__).parents[2]


def programs(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def executed(program):
    """The names that a program leaves."""
    names = {}
    exec(program, names)
    return names


def test_the_program_of_the_readme_prints_what_it_shows(capsys):
    (program,) = programs("README.md")
    assert sum(1 for line in program.splitlines() if line) <= 9
    names = executed(program)
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert capsys.readouterr().out == shown
    exact = jax.grad(names["loss"])(names["params"], names["x"])
    for name, gradient in names["gradients"].items():
        assert gradient.dtype == names["params"][name].dtype
        assert jax.numpy.linalg.norm(gradient - exact[name]) < 0.3 * jax.numpy.linalg.norm(exact[name])


def test_the_pages_of_the_project_are_short():
    lines = len((ROOT / "README.md").read_text().splitlines())
    words = {page: len((ROOT / page).read_text().split()) for page in ("CONTRIBUTING.md", "SECURITY.md")}
    assert lines <= 110 and words["CONTRIBUTING.md"] <= 500 and words["SECURITY.md"] <= 250


def test_the_page_of_peers_has_the_readmes_comparison():
    rows = re.findall(r"^\| .* \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    page = (ROOT / "docs/benchmarks/peers.md").read_text()
    assert len(rows) > 10 and "\n".join(rows) in page


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_the_front_pages_lead_somewhere(document):
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("not in the source tree")
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", text)
    files = [link or picture for link, picture in links if "://" not in (link or picture)]
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_scaling_programs_of_the_documents_run(capsys):
    names = {}
    for program in programs("docs/explanation/scaling.md"):
        exec(program, names)
    said = capsys.readouterr().out
    assert "all-gather among 8: u8[" in said and "reduce-scatter among 8: f32[64, 1024]" in said
    x, kernel = (jax.device_get(names[name]) for name in ("x", "kernel"))
    expected = jlp.scaled_matmul(jlp.quantize(x, jlp.NVFP4()), jlp.quantize(kernel, jlp.NVFP4((16, 16)), axis=-2).mT)
    assert (names["y"] == expected).all() and names["y"].shape == (1024, 1024)


def test_the_recipe_of_the_documents_answers_by_role():
    names = {}
    exec(programs("docs/how-to/recipes.md")[0], names)
    recipe = names["recipe"]
    assert recipe.roles("linear", "up").weight.format == jlp.MXFP4()
    assert recipe.roles("linear", "model/head").weight is None


def test_the_recipe_of_the_documents_chooses_by_name(capsys):
    names = {"jlp": jlp}
    exec(programs("docs/how-to/recipes.md")[1], names)
    chosen = [names["recipe"].at(name) for name in ("block_21/mlp/up", "block_9/attention/out", "block_9/mlp/up")]
    assert chosen == [None, jlp.MXFP8BlockScaling(), jlp.NVFP4BlockScaling()]
    assert "all others" in capsys.readouterr().out


def test_the_delayed_scaling_program_of_the_documents_runs():
    names = {}
    exec(programs("docs/how-to/recipes.md")[3], names)
    history = getattr(names["model"], OVERWRITE_WITH_GRADIENT)["input_amax_history"][...]
    amax = abs(names["x"]).max()
    assert history[0] == history[-1] == amax and history.sum() == 2 * amax


def test_the_program_of_mixed_precision_of_the_documents_runs():
    names = {}
    exec(programs("docs/how-to/recipes.md")[4], names)
    x, w, jlp = names["x"], names["w"], names["jlp"]
    y = jlp.linear(x, w, recipe=jlp.NVFP4BlockScaling())
    dy = jax.grad(lambda y: jax.numpy.mean(y**2))(y)
    dx = jax.vjp(lambda x: jlp.linear(x, w, recipe=jlp.MXFP8BlockScaling()), x)[1](dy)[0]
    assert (names["dx"] == dx).all() and names["dw"].dtype == w.dtype


@pytest.mark.slow
def test_the_program_of_eden_of_the_documents_runs():
    """The gradient is that of high precision but for the error that the document states."""
    names = {}
    exec(programs("docs/how-to/recipes.md")[5], names)
    jnp, jlp, x, w = names["jnp"], names["jlp"], names["x"], names["w"]
    exact = jax.grad(lambda w: jnp.mean(jlp.linear(x, w, recipe=None) ** 2))(w)
    assert 0 < jnp.linalg.norm(names["dw"] - exact) / jnp.linalg.norm(exact) < 0.2


def test_the_programs_of_rows_of_the_documents_run():
    names = {"jlp": jlp}
    exec(programs("docs/how-to/recipes.md")[6], names)
    assert (names["y"] == 64).all()
    exec(programs("docs/how-to/recipes.md")[7], names)
    x, w, w8a8 = names["x"], names["w"], names["w8a8"]
    served = jlp.scaled_matmul(jlp.quantize(x, w8a8.activation_format), jlp.quantize(w, w8a8.weight_format, axis=-2).mT)
    assert (names["y"] == served).all()


def test_the_schedule_of_the_documents_compiles_once_a_phase():
    names = {}
    exec(programs("docs/how-to/recipes.md")[8], names)
    assert names["step"]._cache_size() == 2
    assert names["schedule"].next_change(0) == 8 and jax.numpy.isfinite(names["w"]).all()


def test_the_oscillating_weight_of_the_documents_settles():
    names = {}
    exec(programs("docs/how-to/recipes.md")[9], names)
    assert names["at_the_end_of_the_window"] == 1.5


def test_the_recipe_of_the_documents_leaves_out_what_it_says():
    names = {"jlp": jlp}
    exec(programs("docs/how-to/recipes.md")[2], names)
    applies = [names["recipe"].applies_to(name) for name in ("attention/qkv", "attention/out", "lm_head")]
    assert applies == [True, False, False]


def test_the_int4_programs_of_the_documents_run():
    names = {}
    for program in programs("docs/how-to/int4.md"):
        exec(program, names)
    assert names["served_params"]["up"].format == jlp.Int4(group_size=32) and (names["y"] == 64 * 128).all()


@pytest.mark.slow
def test_the_programs_of_experts_of_the_documents_run():
    names = {}
    for program in programs("docs/how-to/moe.md"):
        exec(program, names)
    assert names["aux"].group_sizes.sum() == 4 * 32 * 2 and jax.numpy.isfinite(names["value"])
    assert names["tape"].experts.shape == (1, 1, 3, 2) and names["used"].shape == (4, 32, 2)
    assert names["choices"].shape == (names["devices"] * 4, 32, 2) and names["outputs"].shape == names["tokens"].shape
    found = names["found"]
    assert (found.tokens == 128).all() and (found.same_order <= found.same_set).all() and (found.same_set > 0.5).all()


@pytest.mark.slow
def test_the_program_of_fine_tuning_writes_texts():
    names = {}
    exec(programs("docs/how-to/finetune.md")[0], names)
    assert all((scores < 0).all() for scores in names["written"].log_probabilities)
