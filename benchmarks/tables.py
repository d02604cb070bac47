"""Writes the measured tables and charts into the documents, from the files in benchmarks/results.

python benchmarks/tables.py            # rewrites docs/pictures, and between <!-- table: NAME --> and <!-- end -->
python benchmarks/tables.py --check    # fails where a document or a chart differs from the results
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

import memory_tables
import mesh_tables
import peer_tables
import recipe_table
import speed_tables
import study_tables
from charts import CHARTS
from recorded import ROOT

DOCUMENTS = ROOT / "docs"
PICTURES = DOCUMENTS / "pictures"
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES = {
    f.__name__: f
    for f in (
        *(speed_tables.speed, speed_tables.formats, speed_tables.int4, speed_tables.weight_only, speed_tables.grouped),
        *(
            speed_tables.convert,
            speed_tables.convert_7b,
            speed_tables.weight_sync,
            speed_tables.speed_summary,
            speed_tables.train_step,
        ),
        *(speed_tables.rows, speed_tables.generation, speed_tables.telemetry, speed_tables.scaling, speed_tables.gpu),
        *(speed_tables.tracing, speed_tables.tracing_trainers),
        *(
            study_tables.study,
            study_tables.frontier_study,
            study_tables.frontier_small,
            study_tables.frontier_cost,
            study_tables.instructions,
            study_tables.sums_study,
            study_tables.policy_study,
            study_tables.saved_study,
            study_tables.eight_bit_study,
            study_tables.optimizer_study,
            study_tables.optimizer_study_demo,
            study_tables.optimizer_study_small,
            *(study_tables.kv_formats, study_tables.kv_speed),
            study_tables.calibration,
        ),
        *(mesh_tables.traffic, mesh_tables.projection, mesh_tables.mesh_overhead),
        *(mesh_tables.expert_exchange, mesh_tables.exchange_bytes),
        *peer_tables.TABLES,
        *(recipe_table.recipes, memory_tables.block, memory_tables.checkpoint_policies),
        *(memory_tables.lora_memory, memory_tables.accumulation),
        *(memory_tables.optimizer_bytes, memory_tables.optimizer_memory),
    )
}


def wanted() -> dict[pathlib.Path, str]:
    """What each generated file, and each document with a generated table, has to hold.

    Raises:
        ValueError: a table stands in no document.
    """
    files = {PICTURES / f"{name}.svg": chart().drawn() for name, chart in CHARTS.items()}
    placed = set()
    for path in sorted(DOCUMENTS.rglob("*.md")):
        text = path.read_text()
        placed |= {name for _, name, _ in _PLACE.findall(text)}
        files[path] = _PLACE.sub(lambda m: m[1] + TABLES[m[2]]() + "\n" + m[3], text)
    if missing := TABLES.keys() - placed:
        raise ValueError(f"no document has a place for the tables {', '.join(sorted(missing))}")
    return files


def main() -> None:
    """Rewrites, or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = {path: text for path, text in wanted().items() if not path.exists() or path.read_text() != text}
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if stale and options.check:
        sys.exit(f"{names}: not what benchmarks/results say; run python benchmarks/tables.py")
    for path, text in stale.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    if stale:
        print(f"written: {names}")


if __name__ == "__main__":
    main()
