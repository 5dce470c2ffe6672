"""The command line, where it could surprise."""

from pathlib import Path

import pytest

from romancy.cli.main import main


@pytest.mark.parametrize("command", [["list"], ["show", "x"], ["cancel", "x"], ["unpark", "x"]], ids=lambda it: it[0])
def test_looking_at_a_file_that_is_not_there_does_not_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    path = tmp_path / "ordres.db"
    assert main([*command, "--url", f"sqlite:///{path}"]) == 1
    assert f"there is no SQLite database '{path}'" in capsys.readouterr().err
    assert not path.exists()
