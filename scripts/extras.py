"""Prints what extras of pyproject.toml require, but for this package, which pip would install: extras.py EXTRA..."""

import pathlib
import sys
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print(*(needed for name in sys.argv[1:] for needed in extras[name] if not needed.startswith(project["name"])))
