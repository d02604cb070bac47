"""rl_loop.py --engine ray as a user runs it, and what becomes of it when one of its processes is killed."""

import pathlib

import pytest

from tests.examples.on_ray.runs import SCRIPT, SMALL, Run, answering, numbers, records_of
from tests.helpers import refused, run_python

pytest.importorskip("ray", reason="Ray is not installed: pip install jaxlowprec[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

ITERATIONS = ("--iterations", "40")


def addresses(processes):
    """The addresses on which processes listen for TCP connections, as /proc has them: hexadecimal, with ports."""
    sockets = set()
    for process in processes:
        for descriptor in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
            sockets.add(str(descriptor.readlink()) if descriptor.is_symlink() else "")
    lines = [
        line for table in ("tcp", "tcp6") for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    fields = [line.split() for line in lines]
    return {field[1] for field in fields if field[3] == "0A" and f"socket:[{field[9]}]" in sockets}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run: its folder, the run, and the addresses on which it listened."""
    out = tmp_path_factory.mktemp("rl")
    with Run(out, "--rollouts", "2", *ITERATIONS) as run:
        run.wait_for(lambda: run.iterations)
        listening = addresses(run.of("worker", "trainer", "raylet", "driver"))
        assert run.wait() == 0, run.text
        assert run.survivors() == []
    return out, run, listening


def test_two_workers_answer_and_every_bit_agrees(whole):
    out, run, _ = whole
    records = records_of(out)
    assert [record["version"] for record in records] == list(range(1, 41)) and run.iterations == 40
    assert all(record["train_rollout_logprob_abs_diff"] == 0 == record["differing"] for record in records)
    assert all(record["compared"] == 4 * 4 * 2 for record in records)
    assert len(answering(records)) == 2
    for record in records:
        assert {part["weights_digest"] for part in record["answered_by"]} == {record["published_digest"]}
    assert len({record["published_digest"] for record in records}) == 40  # each version has other weights
    assert "train_rollout_logprob_abs_diff: 0 in 40 iterations" in run.text and "lost" not in run.text


def test_the_numbers_are_those_without_ray(whole, tmp_path):
    run_python(SCRIPT, "--out", str(tmp_path), *SMALL, *ITERATIONS)
    alone, on_ray = numbers(records_of(tmp_path)), numbers(records_of(whole[0]))
    assert alone == [{name: record[name] for name in alone[0]} for record in on_ray]
    assert set(on_ray[0]) - set(alone[0]) == {"published_digest"}


def test_it_listens_on_loopback_only(whole):
    _, _, listening = whole
    assert len(listening) >= 5  # raylet, driver and three actors
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
    assert [address for address in listening if not address.startswith(loopback)] == []


def test_a_killed_worker_comes_back_to_the_newest_version(whole, tmp_path):
    with Run(tmp_path, "--rollouts", "1", *ITERATIONS) as run:
        run.wait_for(lambda: run.iterations >= 5)
        (worker,) = run.of("worker")
        assert worker.kill()
        assert run.wait() == 0, run.text
        assert run.survivors() == []
    records = records_of(tmp_path)
    assert numbers(records) == numbers(records_of(whole[0]))
    first, second = answering(records)
    assert first == worker.pid != second
    assert "rollout 0 was lost while " in run.text and run.iterations == 40  # no iteration is repeated


def test_a_killed_trainer_goes_on_from_its_checkpoint(whole, tmp_path):
    with Run(tmp_path, "--rollouts", "2", "--checkpoint-every", "4", *ITERATIONS) as run:
        run.wait_for(lambda: run.iterations >= 10)
        (trainer,) = run.of("trainer")
        assert trainer.kill()
        workers = {worker.pid for worker in run.of("worker")}
        assert run.wait() == 0, run.text
        assert run.survivors() == []
    records = records_of(tmp_path)
    assert numbers(records) == numbers(records_of(whole[0]))
    assert set(answering(records)) == workers  # which had newer versions than the checkpoint's
    (lost,) = [line for line in run.said if "the trainer was lost; going on after iteration " in line]
    after = int(lost.partition("going on after iteration ")[2].partition(":")[0])
    assert after % 4 == 0 and 4 <= after < 40


def test_a_killed_program_takes_all_along_and_resumes(whole, tmp_path):
    options = ("--rollouts", "2", "--checkpoint-every", "4", *ITERATIONS)
    with Run(tmp_path, *options) as run:
        run.wait_for(lambda: run.iterations >= 10)
        run.processes()
        (driver,) = run.of("driver")
        assert driver.kill()
        assert {process.role for process in run.survivors(10)} <= {None}  # Ray's agents wait for a minute
        assert run.wait() == -9
    assert not (tmp_path / "report.json").exists()
    assert "has checkpoints; --resume goes on from them" in refused(
        SCRIPT, "--engine", "ray", "--out", str(tmp_path), *SMALL, *options
    )
    with Run(tmp_path, "--resume", *options) as run:
        assert run.wait() == 0, run.text
    assert "going on after iteration " in run.text and run.iterations < 40
    assert numbers(records_of(tmp_path)) == numbers(records_of(whole[0]))


def test_an_address_without_a_cluster_is_an_error(tmp_path):
    said = refused(SCRIPT, "--engine", "ray", "--out", str(tmp_path), "--ray-address", "127.0.0.1:1")
    assert "rl_loop: --ray-address 127.0.0.1:1: no cluster answers: " in said


def test_one_changed_code_on_a_workers_side_ends_the_run(tmp_path):
    with Run(tmp_path, "--rollouts", "2", "--damage-version", "2", *ITERATIONS) as run:
        assert run.wait() == 1
        assert run.survivors() == []
    assert "rl_loop: version 2: rollout " in run.text and "answered with weights whose digest is " in run.text
    assert run.iterations == 1 and "Traceback" not in run.text
    assert not (tmp_path / "report.json").exists()
