"""The table of routers in the guide has exactly the configs that are tested."""

import dataclasses

from tests.moe.published import MODELS, Config
from tests.package.test_readme import ROOT


def test_the_table_has_the_tested_configs():
    """But for scales and the number of experts, which differ from model to model."""
    text = (ROOT / "docs" / "how-to" / "moe.md").read_text()
    table = text[text.index("| model | `top_k`") : text.index("| `config.json` | `RouterConfig`")]
    rows = [row.split("|")[3] for row in table.splitlines()[2:] if row]
    written = [eval(f"Config({row.split('`')[1]})") for row in rows if "`" in row]
    assert len(rows) == len(written) + 2  # "the same", and "the default"
    plain = {dataclasses.replace(config, scale=1.0) for config in [*written, Config()]}
    tested = {dataclasses.replace(config, scale=1.0) for config, k in MODELS.values() if k > 1}
    assert plain == tested
