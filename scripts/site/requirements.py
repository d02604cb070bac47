"""Prints the extra `docs` of pyproject.toml: pip would install it only together with the package."""

import pathlib
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"]["docs"])
