"""find_policy: what quantising each layer does, and the rules within a budget."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import jaxlowprec as jlp
from jaxlowprec.models.find_policy import Effect
from jaxlowprec.models.policy_costs import Costs
from jaxlowprec.models.policy_log import Log
from tests.helpers import python_environment

NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
BOTH = {"nvfp4": NVFP4, "mxfp8": MXFP8}
SIZE = 64


def loss(params, x):
    """Three layers; the inputs of "b" have an outlier that spoils its forward product in 4 bits."""
    a = jlp.linear(x, params["a"], name="a")
    b = jlp.linear(a * jnp.where(jnp.arange(SIZE) == 5, 200, 1).astype(a.dtype), params["b"], name="b")
    return jnp.square(jlp.linear(jax.nn.tanh(b), params["c"], name="c").astype(jnp.float32)).mean()


@pytest.fixture(scope="module")
def model():
    """Parameters and batches."""
    *keys, key = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(k, (SIZE, SIZE)) / 8 for name, k in zip("abc", keys, strict=True)}
    params["b"] = params["b"].at[5].multiply(1 / 200)
    return params, jax.random.normal(key, (2, 128, SIZE), jnp.bfloat16)


@pytest.fixture(scope="module")
def by_gemm(model):
    return jlp.find_policy(loss, *model, NVFP4, budget=1 / 9)


@pytest.mark.slow
def test_it_keeps_what_does_most_harm(by_gemm):
    worst = by_gemm.table[0]
    assert (worst.layer, worst.gemm, worst.policy) == ("b", "fprop", "high precision")
    assert by_gemm.recipe == jlp.PerLayer((("b", jlp.PerGemm(dgrad=NVFP4, wgrad=NVFP4)),), default=NVFP4)
    assert by_gemm.cost == pytest.approx(1 / 9)
    assert by_gemm.found.error < 0.7 * by_gemm.quantized.error
    assert by_gemm.found.cosine > by_gemm.quantized.cosine


@pytest.mark.slow
def test_the_table_has_every_gemm_of_every_layer_once(by_gemm):
    rows = [(row.layer, row.gemm) for row in by_gemm.table]
    assert sorted(rows) == [(layer, gemm) for layer in "abc" for gemm in ("dgrad", "fprop", "wgrad")]
    errors = [row.effect.error for row in by_gemm.table]
    assert errors == sorted(errors, reverse=True)
    assert str(by_gemm).count("\n") == len(rows) + 2


@pytest.mark.slow
def test_only_the_forward_product_changes_the_loss(by_gemm):
    for row in by_gemm.table:
        assert (row.effect.loss != 0) == (row.gemm == "fprop"), row


def test_errors_of_gemms_add_up(by_gemm):
    assert sum(row.effect.error for row in by_gemm.table) == pytest.approx(by_gemm.quantized.error, rel=0.5)


@pytest.mark.slow
def test_effects_are_those_of_training_under_the_rules(model):
    params, batches = model
    mxfp8 = jlp.find_policy(loss, params, batches[:1], MXFP8, budget=0, repeats=1)  # nothing is rounded stochastically
    value, gradient = jax.value_and_grad(loss)(params, batches[0])
    for row in mxfp8.table:
        rules = jlp.PerLayer(((row.layer, jlp.PerGemm(**{row.gemm: MXFP8})),))
        with jlp.autocast(rules):
            ours, found = jax.value_and_grad(loss)(params, batches[0])
        flat, wanted = (np.concatenate([np.float64(g[n]).ravel() for n in "abc"]) for g in (found, gradient))
        assert row.effect.loss == pytest.approx(float((ours - value) / value), abs=1e-6)
        error = np.linalg.norm(flat - wanted) ** 2 / np.linalg.norm(wanted) ** 2
        assert row.effect.error == pytest.approx(error, rel=1e-2, abs=1e-9)
        cosine = flat @ wanted / np.linalg.norm(flat) / np.linalg.norm(wanted)
        assert row.effect.cosine == pytest.approx(cosine, abs=1e-5)
    assert np.isnan(mxfp8.table[0].effect.error_se)


@pytest.mark.slow
def test_it_is_deterministic_and_other_keys_differ(model, by_gemm):
    assert jlp.find_policy(loss, *model, NVFP4, budget=1 / 9) == by_gemm
    other = jlp.find_policy(loss, *model, NVFP4, budget=1 / 9, key=jax.random.key(1))
    assert other.table != by_gemm.table and other.recipe == by_gemm.recipe


def test_standard_errors_hold_the_spread_of_keys(by_gemm):
    stochastic = [row for row in by_gemm.table if row.gemm != "fprop" and row.effect.error > 0]
    assert stochastic and all(0 < row.effect.error_se < row.effect.error for row in stochastic)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 0.1, 0.3, 0.6, 1])
def test_a_budget_is_kept(model, budget):
    found = jlp.find_policy(loss, *model, BOTH, budget=budget, by="layer", repeats=1)
    assert found.cost <= budget * (1 + 1e-6)
    assert found.found.error <= found.quantized.error
    if budget == 0:
        assert found.recipe == jlp.PerLayer((), default=NVFP4)


@pytest.mark.slow
def test_a_whole_budget_leaves_no_error(model):
    with pytest.raises(ValueError, match="nothing would be quantised"):
        jlp.PerLayer((), default=None)
    found = jlp.find_policy(loss, *model, NVFP4, budget=1, by="layer", repeats=1)
    assert found.found.error == 0 and found.cost == pytest.approx(1)


@pytest.mark.slow
def test_bytes_are_those_of_the_weights(model):
    found = jlp.find_policy(loss, *model, NVFP4, budget=0.4, cost="bytes", repeats=1)
    assert {row.gemm for row in found.table} == {"all"}
    assert found.recipe == jlp.PerLayer((("b", None),), default=NVFP4)


@pytest.mark.slow
def test_layers_of_a_scan_share_their_rule(model):
    params, batches = model

    def scanned(params, x):
        def body(h, w):
            return h + jlp.linear(jax.nn.tanh(h), w, name="blocks"), None

        h, _ = jax.lax.scan(jax.checkpoint(body), jlp.linear(x, params["a"], name="in"), params["blocks"])
        return jnp.square(h.astype(jnp.float32)).mean()

    stack = {"a": params["a"], "blocks": jnp.stack([params["b"], params["c"]])}
    found = jlp.find_policy(scanned, stack, batches, NVFP4, budget=0.5, by="layer", repeats=1)
    assert sorted(row.layer for row in found.table) == ["blocks", "in"]


@pytest.mark.slow
def test_parameters_that_the_function_joins_have_one_rule(model):
    """Blocks in a stack that a scan runs, whose queries and keys are one matrix; the rule holds for every block."""
    w, (x, _) = model[0]["a"], model[1]
    params = {"blocks": [{"q": w[:, :32], "k": w[:, 32:], "down": w.T} for _ in range(2)], "head": w}

    def joining(params, x):
        stack = jax.tree.map(lambda *parts: jnp.stack(parts), *params["blocks"])

        def body(x, b):
            fused = jnp.concatenate([b["q"], b["k"]], 1).astype(x.dtype)
            return jnp.tanh(x @ fused) @ b["down"].astype(x.dtype), None

        y = jax.lax.scan(body, x, stack)[0] @ params["head"].astype(x.dtype)
        return jnp.square(y.astype(jnp.float32)).mean()

    policy = jlp.find_policy(joining, params, [x], NVFP4, budget=1.0, by="layer")
    assert {row.layer for row in policy.table} == {"blocks/0/q", "blocks/0/down", "head"}
    names = ("blocks/1/q", "blocks/0/k", "blocks/1/k", "blocks/0/q", "blocks/1/down")
    assert [policy.recipe.at(name) for name in names] == [None] * 5
    assert policy.found.error == 0


def test_layers_of_flax(model):
    _, batches = model

    class Model(flax_nnx.Module):
        def __init__(self, rngs):
            self.up = jlp.nnx.Linear(SIZE, SIZE, dtype=jnp.bfloat16, rngs=rngs)
            self.down = jlp.nnx.Linear(SIZE, SIZE, dtype=jnp.bfloat16, recipe=None, rngs=rngs)

        def __call__(self, x):
            return self.down(flax_nnx.gelu(self.up(x)))

    built = Model(flax_nnx.Rngs(0))

    def loss_of(state, x):
        return jnp.square(flax_nnx.merge(graph, state)(x).astype(jnp.float32)).mean()

    graph, state = flax_nnx.split(built)
    with pytest.raises(ValueError, match=r"layers have no names.*name_layers"):
        jlp.find_policy(loss_of, state, batches, NVFP4, budget=0.5)
    jlp.nnx.name_layers(built)
    graph, state = flax_nnx.split(built)
    found = jlp.find_policy(loss_of, state, batches, NVFP4, budget=0, by="layer", repeats=1)
    assert [row.layer for row in found.table] == ["up"]  # "down" has a recipe of its own: none


class TestFile:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "search" / "policy.jsonl"

    def find(self, model, path, **options):
        return jlp.find_policy(loss, *model, NVFP4, budget=1 / 9, path=path, **options)

    @pytest.mark.slow
    def test_a_search_goes_on_where_it_was_stopped(self, model, by_gemm, path, monkeypatch):
        assert self.find(model, path) == by_gemm
        whole = path.read_bytes()
        for length in (0, 5, len(whole) // 3, len(whole) - 1, len(whole)):
            path.write_bytes(whole[:length])
            assert self.find(model, path) == by_gemm
            assert path.read_bytes() == whole
        monkeypatch.setattr("jaxlowprec.models.find_policy._Search.alone", None)  # nothing is measured again
        assert self.find(model, path) == by_gemm

    @pytest.mark.slow
    def test_another_search_is_refused(self, model, path):
        self.find(model, path)
        with pytest.raises(ValueError, match="has the measurements of another search"):
            self.find(model, path, key=jax.random.key(1))
        params, batches = model
        with pytest.raises(ValueError, match="measured with another model or other batches: batch 0 had the loss"):
            self.find((params, batches * 2), path)
        path.write_text("something else\n")
        with pytest.raises(ValueError, match="is another file"):
            self.find(model, path)
        assert path.read_text() == "something else\n"


class TestLog:
    ABOUT = {"units": [["up", "fprop", "NVFP4"]]}  # noqa: RUF012

    def written(self, path):
        with Log(path, self.ABOUT) as log:
            log.put("reference", 0, [1.0, 2.0])
            log.put(("up", "fprop", "NVFP4"), 0, 0, [0.1, 0.9, 0.2])
        return path.read_bytes()

    def test_a_file_of_somebody_else_stays(self, tmp_path):
        path = tmp_path / "config.json"
        whole = self.written(tmp_path / "log.jsonl")
        for content in (b'{"model_type":"llama","precious":1}', b"x", b'{"format"  ', b"\xff", whole[1:40], b"[]\n"):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="or is another file"):
                Log(path, self.ABOUT)
            assert path.read_bytes() == content

    def test_a_log_cut_anywhere_goes_on(self, tmp_path):
        whole = self.written(tmp_path / "log.jsonl")
        for length in range(len(whole)):
            path = tmp_path / "cut.jsonl"
            path.write_bytes(whole[:length])
            with Log(path, self.ABOUT) as log:
                found = log.get("reference", 0)
            assert path.read_bytes() == whole[: max(whole[:length].rfind(b"\n") + 1, whole.find(b"\n") + 1)]
            assert found in (None, [1.0, 2.0])

    @pytest.mark.parametrize(
        "line",
        [b"garbage", b"5", b"[]", b"", b'[["a"],1]', b'["[]",1]', b'["[1]","x",1,2]', b'["[1]",1,2]', b"[" * 100_000,
         b'["[1]",1,2,' + b"9" * 400 + b"]"],
    )  # fmt: skip
    def test_a_damaged_line_is_named(self, tmp_path, line):
        path = tmp_path / "log.jsonl"
        whole = self.written(path)
        path.write_bytes(whole + line + b"\n")
        with pytest.raises(ValueError, match=r"log.jsonl:4 is damaged; delete that line, or give another path="):
            Log(path, self.ABOUT)
        assert path.read_bytes() == whole + line + b"\n"

    def test_of_two_searches_that_start_at_once_one_has_the_file(self, tmp_path):
        """Two processes: each says whether it wrote or why it was refused, and keeps the file until it is told."""
        path = tmp_path / "log.jsonl"
        program = """
            import sys, time
            from jaxlowprec.models.policy_log import Log
            path, mine = sys.argv[1:]
            print("ready", flush=True)
            sys.stdin.readline()
            try:
                with Log(path, {"units": [["up", "fprop", "NVFP4"]]}) as log:
                    for repeat in range(200):
                        log.put(("up", mine, "NVFP4"), 0, repeat, [0.1, 0.9, 0.2])
                    print("wrote", flush=True)
                    sys.stdin.readline()
            except ValueError as error:
                print(error, flush=True)
        """
        start = [sys.executable, "-c", textwrap.dedent(program), str(path)]
        searches = [
            subprocess.Popen(
                [*start, name], env=python_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for name in ("first", "second")
        ]
        for search in searches:
            assert search.stdout.readline() == "ready\n"
        for search in searches:
            search.stdin.write("\n")
            search.stdin.flush()
        said = [search.stdout.readline() for search in searches]
        refused = f"find_policy: another search writes {path} now; wait until it has ended, or give another path=\n"
        assert sorted(said) == sorted(["wrote\n", refused])
        for search in searches:
            search.communicate("\n", timeout=60)
        winner = ("first", "second")[said.index("wrote\n")]
        with Log(path, self.ABOUT) as log:  # which is free again
            assert all(log.get(("up", winner, "NVFP4"), 0, repeat) == [0.1, 0.9, 0.2] for repeat in range(200))
        assert path.read_bytes().count(b"\n") == 201

    def test_a_refused_file_is_free_for_another_search(self, tmp_path):
        whole = self.written(tmp_path / "log.jsonl")
        with Log(tmp_path / "log.jsonl", self.ABOUT):
            for about in (self.ABOUT, {"units": []}):
                with pytest.raises(ValueError, match="another search writes .*log.jsonl now"):
                    Log(tmp_path / "log.jsonl", about)
        with pytest.raises(ValueError, match="measurements of another search"):
            Log(tmp_path / "log.jsonl", {"units": []})
        assert self.written(tmp_path / "log.jsonl").startswith(whole)

    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "log.jsonl")
        with pytest.raises(ValueError, match="is no file"):
            Log(tmp_path / "log.jsonl", self.ABOUT)


class TestChoice:
    """Of options, by their errors and costs."""

    def effects(self, errors):
        return {place: Effect(0, 1, error, 0, 0, 0) for place, error in errors.items()}

    def test_the_most_error_for_its_cost_comes_first(self):
        costs = Costs({"large": (300, 9), "small": (100, 9)}, {"nvfp4": NVFP4}, "flops", "layer")
        effects = self.effects({("large", "all", "nvfp4"): 2.0, ("small", "all", "nvfp4"): 1.0})
        assert costs.choose(effects, 0.25) == {("large", "all"): "nvfp4", ("small", "all"): None}
        assert costs.choose(effects, 0.75) == {("large", "all"): "nvfp4", ("small", "all"): None}
        assert costs.choose(effects, 1) == {("large", "all"): None, ("small", "all"): None}

    def test_a_cheaper_recipe_comes_before_high_precision(self):
        costs = Costs({"a": (1, 1), "b": (1, 1)}, BOTH, "flops", "layer")
        errors = {("a", "nvfp4"): 1.0, ("a", "mxfp8"): 0.1, ("b", "nvfp4"): 0.3, ("b", "mxfp8"): 0.29}
        effects = self.effects({(layer, "all", label): error for (layer, label), error in errors.items()})
        eight = costs.of("a", "mxfp8")
        assert 0.1 < eight < 0.25 and costs.of("a", None) == 0.5 and costs.of("a", "nvfp4") == 0
        assert costs.choose(effects, 0.2) == {("a", "all"): "mxfp8", ("b", "all"): "nvfp4"}
        assert costs.choose(effects, eight + 0.5) == {("a", "all"): "mxfp8", ("b", "all"): None}
        assert costs.choose(effects, 1) == {("a", "all"): None, ("b", "all"): None}

    def test_a_recipe_that_does_more_harm_is_not_taken(self):
        costs = Costs({"a": (1, 1)}, BOTH, "flops", "layer")
        effects = self.effects({("a", "all", "nvfp4"): 0.1, ("a", "all", "mxfp8"): 0.2})
        assert costs.choose(effects, 0.9) == {("a", "all"): "nvfp4"}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"candidates": "nvfp4"}, TypeError, "needs a recipe, or recipes by label"),
        ({"candidates": {}}, TypeError, "needs a recipe, or recipes by label"),
        ({"candidates": jlp.PerLayer((("a", NVFP4),))}, ValueError, "needs a recipe for all three GEMMs of all layers"),
        ({"candidates": jlp.DelayedScaling()}, ValueError, "without a state"),
        ({"candidates": jlp.Int4QAT()}, ValueError, "not for quantisation-aware training"),
        ({"budget": 1.5}, ValueError, "budget=1.5; needs a share, 0 to 1"),
        ({"budget": float("nan")}, ValueError, "needs a share"),
        ({"cost": "time"}, ValueError, 'needs "flops" or "bytes"'),
        ({"by": "role"}, ValueError, 'needs "gemm" or "layer"'),
        ({"by": "gemm", "cost": "bytes"}, ValueError, 'use by="layer"'),
        ({"repeats": 0}, ValueError, "needs a positive number of keys"),
        ({"batches": []}, ValueError, "batches is empty"),
        ({"loss_fn": 3}, TypeError, "needs a function"),
        ({"loss_fn": lambda params, x: x}, TypeError, "needs a loss, a scalar"),
        ({"loss_fn": lambda params, x: jnp.float32(params["a"].sum())}, ValueError, "no layer of loss_fn follows"),
        ({"loss_fn": lambda params, x: loss(params, x) / 0}, FloatingPointError, "in high precision batch 0 has the"),
    ],
)
def test_bad_arguments_are_refused(model, change, error, words):
    params, batches = model
    given = {"loss_fn": loss, "params": params, "batches": batches, "candidates": NVFP4, "budget": 0.2} | change
    with pytest.raises(error, match=f"find_policy: .*{words}"):
        jlp.find_policy(**given)


def test_the_result_is_plain_data(by_gemm):
    assert dataclasses.asdict(by_gemm.table[0])["effect"]["cosine"] == by_gemm.table[0].effect.cosine


@pytest.mark.slow
def test_experts_of_a_layer_are_chosen_together(model):
    sizes, x = jnp.array([50, 0, 70]), jax.random.normal(jax.random.key(3), (1, 128, SIZE), jnp.bfloat16)

    def with_experts(params, x):
        y = jlp.grouped_matmul(x, params["experts"], sizes, name="experts")
        return jnp.square(jlp.linear(jax.nn.tanh(y), params["a"], name="a").astype(jnp.float32)).mean()

    params = {"a": model[0]["a"], "experts": jax.random.normal(jax.random.key(4), (3, SIZE, SIZE)) / 8}
    found = jlp.find_policy(with_experts, params, x, BOTH, budget=0.5, by="layer", repeats=1)
    assert sorted({row.layer for row in found.table}) == ["a", "experts"]
    assert {row.high_precision_cost for row in found.table} == {0.5}  # as many rows, of kernels of one size
    alone = next(row.effect for row in found.table if (row.layer, row.candidate) == ("experts", "mxfp8"))
    exact = with_experts(params, x[0])
    with jlp.autocast(jlp.PerLayer((("experts", MXFP8),))):
        assert alone.loss == pytest.approx(float((with_experts(params, x[0]) - exact) / exact), abs=1e-6)
    assert found.found.error < found.quantized.error
