"""scripts/install_gpu.sh, with an interpreter that pretends to install."""

import os
import shutil
import subprocess

import pytest

from tests.scripts.stand_ins import NVIDIA_SMI, SCRIPTS, needs_scripts, program

pytestmark = needs_scripts

PYTHON = """
case "$*" in
  *sys.prefix*) echo "$PREFIX" ;;
  *) echo "$*" ;;
esac
"""


@pytest.mark.parametrize("environment", ["of make", "another", "another, beside that of make"])
def test_only_the_environment_of_make_counts_as_installed(tmp_path, environment):
    root, tools = tmp_path / "tree", tmp_path / "tools"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPTS / "install_gpu.sh", root / "scripts")
    program(tools, "nvidia-smi", NVIDIA_SMI)
    python = program(tools, "python3", PYTHON)
    if environment != "another":
        (root / ".venv").mkdir()
    prefix = root / ".venv" if environment == "of make" else tmp_path
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "PYTHON": str(python), "PREFIX": str(prefix)}
    command = [root / "scripts" / "install_gpu.sh"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "cmake.define.JAXLOWPREC_CUDA=ON --editable" in done.stdout
    assert "jaxlowprec.cli.main info" in done.stdout
    assert (root / ".venv" / "installed").exists() == (environment == "of make")
