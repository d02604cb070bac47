"""Counts what a reader of jaxlowprec holds in mind: files, their lines, imports between them, and the files of a call.

    .venv/bin/python scripts/count_house.py

prints one figure a line. `--call` adds the files that `jlp.linear` under NVFP4 goes through, forward and backward.
"""

import argparse
import ast
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jaxlowprec"
SHORT = 60


def module_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree, modules):
    """The modules of the package that one module imports when it runs: inside functions too, but not for types only."""
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if found := whole if whole in modules else node.module if node.module in modules else None:
                    yield found
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def circles_of(edges):
    """The sets of modules that import each other in a circle (Tarjan's strongly connected components)."""
    index, low, stack, circles = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            circle = set()
            while node not in circle:
                circle.add(stack.pop())
            if len(circle) > 1:
                circles.append(circle)

    for node in edges:
        if node not in index:
            visit(node)
    return circles


def files_of_a_call():
    """The files that the trace of `jlp.linear` and of its gradient enters, and how often one file calls another."""
    import jax
    import jax.numpy as jnp

    import jaxlowprec as jlp

    def loss(x, kernel):
        return jlp.linear(x, kernel, recipe=jlp.NVFP4BlockScaling(), key=jax.random.key(0)).sum()

    entered, changes = set(), 0

    def watch(frame, event, _):
        nonlocal changes
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)):
            entered.add(file)
            caller = frame.f_back
            while caller and not caller.f_code.co_filename.startswith(str(PACKAGE)):
                caller = caller.f_back
            changes += caller is not None and caller.f_code.co_filename != file

    x, kernel = jnp.ones((64, 128)), jnp.ones((128, 64))
    sys.setprofile(watch)
    try:
        jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, kernel)
    finally:
        sys.setprofile(None)
    return len(entered), changes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call", action="store_true", help="also trace jlp.linear")
    args = parser.parse_args()
    files = {module_of(file): file for file in PACKAGE.rglob("*.py")}
    lines = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    pairs = {name: list(imports_of(ast.parse(file.read_text()), files)) for name, file in files.items()}
    edges = {name: set(found) - {name, "jaxlowprec"} for name, found in pairs.items()}
    inner = {name: count for name, count in lines.items() if files[name].name != "__init__.py"}
    circles = circles_of({name: found for name, found in edges.items() if name != "jaxlowprec"})
    figures = {
        "files": len(files),
        "lines": sum(lines.values()),
        "median lines (without __init__)": statistics.median(inner.values()),
        f"under {SHORT} lines (without __init__)": sum(count < SHORT for count in inner.values()),
        "imports between files": sum(map(len, edges.values())),
        "names imported": sum(map(len, pairs.values())),
        "circles": len(circles),
    }
    if args.call:
        figures["files of jlp.linear"], figures["changes of file"] = files_of_a_call()
    for name, figure in figures.items():
        print(f"{figure:>7,}  {name}")
    for circle in circles:
        print("         circle:", *sorted(circle))


if __name__ == "__main__":
    main()
