"""The programs of docs/how-to/weight_sync_transports.md run as they stand."""

from tests.package.test_readme import programs


def test_the_programs_of_the_document_run(capsys):
    names = {}
    for program in programs("docs/how-to/weight_sync_transports.md"):
        exec(program, names)
    assert capsys.readouterr().out.splitlines() == ["1 [1. 1. 1. 1.]", "1 [1. 1. 1. 1.]"]
    assert names["rollout"].takes_arrays is False
