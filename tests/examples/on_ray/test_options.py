"""What the command line says about Ray, whether Ray is there or not."""

import importlib.util

import pytest
import rl_loop

from tests.examples.on_ray.runs import EXAMPLES
from tests.helpers import python_environment, run_python


def refused(monkeypatch, capsys, *options):
    monkeypatch.setattr("sys.argv", ["rl_loop.py", *options])
    with pytest.raises(SystemExit) as ended:
        rl_loop.arguments()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refused(monkeypatch, capsys, "--engine", "ray")
    assert "--engine ray: Ray is not installed; pip install 'jaxlowprec[ray]'" in said


@pytest.mark.parametrize("options", [("--rollouts", "2"), ("--ray-address", "a:1")])
def test_options_of_ray_need_it(monkeypatch, capsys, options):
    assert f"{options[0]}: needs --engine ray" in refused(monkeypatch, capsys, *options)


def test_a_worker_needs_a_prompt(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    said = refused(monkeypatch, capsys, "--engine", "ray", "--rollouts", "3", "--prompts", "2")
    assert "--rollouts 3: needs at most as many as --prompts, 2" in said


def test_an_address_has_a_port(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    said = refused(monkeypatch, capsys, "--engine", "ray", "--ray-address", "auto")
    assert "--ray-address auto: needs HOST:PORT" in said


@pytest.mark.slow
def test_the_default_imports_no_ray():
    code = "import sys, rl_loop; sys.argv[1:] = []; print(rl_loop.arguments().engine, 'ray' in sys.modules)"
    path = f"{python_environment()['PYTHONPATH']}:{EXAMPLES}"
    assert run_python("-c", code, PYTHONPATH=path).stdout == "process False\n"
