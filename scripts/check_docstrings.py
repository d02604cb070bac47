"""Finds docstrings that begin without their subject, with What, Which, The same, As, Of, Those or That.

    .venv/bin/python scripts/check_docstrings.py [FOLDER]

prints the place of each and fails if there is one. The docstrings are those of modules, classes and functions, and the
texts behind attributes. The folder is jaxlowprec by default.
"""

import ast
import pathlib
import re
import sys

RIDDLE = re.compile(r"\s*(What|Which|The same|As|Of|Those|That)\b")


def riddles(folder):
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str) and RIDDLE.match(text):
                line = text.strip().splitlines()[0]
                yield f"{file}:{node.lineno}: begins without its subject: {line}"


if __name__ == "__main__":
    found = list(riddles(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "jaxlowprec")))
    sys.exit("\n".join(found) or None)
