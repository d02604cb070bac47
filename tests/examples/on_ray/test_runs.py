"""rl_loop.py --engine ray as a user runs it, and what becomes of it when one of its processes is killed."""

import pathlib

import pytest

from tests.examples.on_ray.runs import SCRIPT, SMALL, Run, answering, numbers, records_of
from tests.helpers import refused, run_python

pytest.importorskip("ray", reason="Ray is not installed: pip install jaxlowprec[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

LAST = 20
ITERATIONS = ("--iterations", str(LAST))


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
    with Run(out, "--rollouts", "2", *ITERATIONS, hold_after=[1]) as run:
        run.wait_until_held(1)
        listening = addresses(run.of("worker", "trainer", "raylet", "driver"))
        run.proceed(1)
        assert run.wait() == 0, run.text
        assert run.survivors() == []
    return out, run, listening


def test_two_workers_answer_and_every_bit_agrees(whole):
    out, run, _ = whole
    records = records_of(out)
    assert [record["version"] for record in records] == list(range(1, LAST + 1)) and run.iterations == LAST
    assert all(record["train_rollout_logprob_abs_diff"] == 0 == record["differing"] for record in records)
    assert all(record["compared"] == 4 * 4 * 2 for record in records)
    assert len(answering(records)) == 2
    for record in records:
        assert {part["weights_digest"] for part in record["answered_by"]} == {record["published_digest"]}
    assert len({record["published_digest"] for record in records}) == LAST  # each version has other weights
    assert f"train_rollout_logprob_abs_diff: 0 in {LAST} iterations" in run.text and "lost" not in run.text


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


def test_a_killed_worker_and_then_a_killed_trainer_come_back(whole, tmp_path):
    """The worker to the newest version; the trainer to its checkpoint, whose version is older than the worker's."""
    options = ("--rollouts", "1", "--checkpoint-every", "4", *ITERATIONS)
    with Run(tmp_path, *options, hold_after=[3, 10]) as run:
        run.wait_until_held(3)
        (first,) = run.of("worker")
        assert first.kill()
        run.proceed(3)
        run.wait_until_held(10)
        assert run.iterations == 10 and "the trainer was lost" not in run.text  # no iteration is repeated
        assert "rollout 0 was lost while " in run.text
        (second,), (trainer,) = run.of("worker"), run.of("trainer")
        assert trainer.kill()
        run.proceed(10)
        assert run.wait() == 0, run.text
        assert run.survivors() == []
    records = records_of(tmp_path)
    assert numbers(records) == numbers(records_of(whole[0]))
    assert answering(records) == [first.pid, second.pid] and first.pid != second.pid
    (lost,) = [line for line in run.said if "the trainer was lost; going on after iteration " in line]
    after = int(lost.partition("going on after iteration ")[2].partition(":")[0])
    assert after in (4, 8)


def test_a_killed_program_takes_all_along_and_resumes(whole, tmp_path):
    options = ("--rollouts", "2", "--checkpoint-every", "4", *ITERATIONS)
    with Run(tmp_path, *options, hold_after=[10]) as run:
        run.wait_until_held(10)
        (driver,) = run.of("driver")
        assert driver.kill()
        assert run.survivors(agents=False) == []  # Ray's agents wait for a minute
        assert run.wait() == -9
    assert not (tmp_path / "report.json").exists()
    assert "has checkpoints; --resume goes on from them" in refused(
        SCRIPT, "--engine", "ray", "--out", str(tmp_path), *SMALL, *options
    )
    with Run(tmp_path, "--resume", *options) as run:
        assert run.wait() == 0, run.text
    assert "going on after iteration " in run.text and run.iterations < LAST
    assert numbers(records_of(tmp_path)) == numbers(records_of(whole[0]))


def test_an_address_without_a_cluster_is_an_error(tmp_path):
    said = refused(SCRIPT, "--engine", "ray", "--out", str(tmp_path), "--ray-address", "127.0.0.1:1")
    assert "rl_loop: --ray-address 127.0.0.1:1: no cluster answers: " in said


def test_one_changed_code_on_a_workers_side_ends_the_run(tmp_path):
    with Run(tmp_path, "--rollouts", "1", "--damage-version", "2", *ITERATIONS) as run:
        assert run.wait() == 1
        assert run.survivors() == []
    assert "rl_loop: version 2: rollout " in run.text and "answered with weights whose digest is " in run.text
    assert run.iterations == 1 and "Traceback" not in run.text
    assert not (tmp_path / "report.json").exists()
