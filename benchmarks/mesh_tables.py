"""Tables of what travels between devices, and of what sharding costs."""

from __future__ import annotations

from cells import markdown, mebibytes, milliseconds
from recorded import load, where


def traffic() -> str:
    """What each device sends for a layer."""
    result = load("traffic")
    rows = [("mesh", "recipe", "sums in", "operands, MiB", "sums, MiB", "all, against bfloat16", "operands")]
    for r in result["results"]:
        plain = next(o for o in result["results"] if (o["placement"], o["recipe"]) == (r["placement"], "bfloat16"))
        ratio = f"{r['operands'] / plain['operands']:.2f}" if plain["operands"] else ""
        total = f"{(r['operands'] + r['sums']) / (plain['operands'] + plain['sums']):.2f}"
        sizes = mebibytes(r["operands"]), mebibytes(r["sums"])
        rows.append((r["placement"], r["recipe"], r["kind_of_sums"], *sizes, total, ratio))
    e = result["environment"]
    compiled = f"compiled for {result['devices']} {result['compiled_for']}"
    return markdown(rows) + f"\n\n{compiled}, jax {e['versions']['jax']}, commit {e['commit']}."


NVLINK, INFINIBAND = 450e9, 50e9  # bytes per second that one H100 sends: NVLink 4, and one 400 Gb/s adapter for each


def projection() -> str:
    """Seconds on the wire for a layer on more devices, from the bytes on eight and the rates of the links."""
    measured = {(r["placement"], (r["recipe"], r["kind_of_sums"])): r for r in load("traffic")["results"]}
    recipes = dict.fromkeys(recipe for _, recipe in measured)
    rows = [("mesh", "recipe", "sums in", "8 H100", "64 H100", "512 H100")]

    def seconds(count: float, rate: float) -> str:
        return f"{1e3 * count / rate:.2f} ms"

    for recipe in recipes:
        r = measured["FSDP", recipe]
        whole = (r["operands"] + r["sums"]) * 8 / 7  # what a device would send among very many
        flat = [seconds(whole * (n - 1) / n, NVLINK if n == 8 else INFINIBAND) for n in (8, 64, 512)]
        rows.append(("FSDP over all", *recipe, *flat))
    for recipe in recipes:
        f, d = measured["FSDP", recipe], measured["data", recipe]
        within, whole = (f["operands"] + f["sums"]) / NVLINK, d["sums"] * 8 / 7 / 8  # of an eighth of the gradients
        both = [f"{1e3 * (within + whole * (n - 1) / n / INFINIBAND):.2f} ms" for n in (1, 8, 64)]
        rows.append(("FSDP within a node, data over nodes", *recipe, *both))
    for recipe in recipes:
        t, f = measured["tensor, sequence", recipe], measured["FSDP", recipe]
        within = (t["operands"] + t["sums"]) / NVLINK
        whole = (f["operands"] + f["sums"]) * 8 / 7 / 8  # each device of a node has an eighth of the weights
        both = [f"{1e3 * (within + whole * (n - 1) / n / INFINIBAND):.2f} ms" for n in (1, 8, 64)]
        rows.append(("tensor and sequence within a node, FSDP over nodes", *recipe, *both))
    return markdown(rows)


def expert_exchange() -> str:
    """A step of experts by all-to-all, against tokens on all devices."""
    result = load("expert_exchange")
    rows = [("recipe, exchange", "speed", "target", "ms", "tokens on all devices, ms")]
    rows += [_compared(c["case"], c) for c in result["cases"]]
    sizes = (
        f"{result['tokens']} tokens, {result['top_k']} of {result['experts']} experts each, {result['width']} by "
        f"{result['hidden']}, {result['devices']} virtual CPU devices; "
    )
    return markdown(rows) + "\n\n" + sizes + where(result)


def exchange_bytes() -> str:
    """What dispatch and combine send, of the bytes of rows in bfloat16."""
    result = load("expert_exchange")
    found = result["bytes"]["found"]
    routers = list(dict.fromkeys(e["router"] for e in found))
    rows = [("`kind=`", "`wire=`", *routers)]
    for exchange, wire in dict.fromkeys((e["exchange"], e["wire"]) for e in found):
        mine = {e["router"]: e for e in found if (e["exchange"], e["wire"]) == (exchange, wire)}
        rows.append((f'`"{exchange}"`', f'`"{wire}"`', *(f"{mine[router]['of_rows']:.2f}" for router in routers)))
    sizes = (
        f"Forward and backward pass under MXFP8, target {result['bytes']['target']}; {result['experts']} experts on "
        f"{result['devices']} devices, tokens {result['bytes']['width']} wide, an untrained router; "
    )
    return markdown(rows) + "\n\n" + sizes + where(result)


def mesh_overhead() -> str:
    """What sharding itself costs."""
    result = load("mesh_overhead")
    rows = [("NVFP4, on eight virtual devices", "speed of one device", "target", "eight, ms", "one, ms")]
    rows += [_compared(c["case"], c) for c in result["cases"]]
    return markdown(rows) + "\n\n" + where(result)


def _compared(name: str, case: dict) -> tuple[str, ...]:
    """A row: the ratio, its target, and both times."""
    ours, theirs = (milliseconds(case[k]["median"]) for k in ("ours", "theirs"))
    target = "" if case["target"] is None else f"{case['target']}x"
    return name, f"{case['ratio']['median']:.2f}x", target, ours, theirs
