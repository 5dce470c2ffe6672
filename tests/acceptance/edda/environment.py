"""The real Edda from the package index, in an environment of its own, installed when a test first needs it."""

import functools
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.servers.packages import FetchError, cache_directory, only_one_process

REQUIREMENT = "edda-framework[postgresql,mysql]==0.16.2"


@functools.cache
def edda_python() -> Path:
    """The Python that can import Edda; FetchError says why it cannot be had."""
    cache = cache_directory()
    name = f"edda-0.16.2-{sys.implementation.cache_tag}"
    home = cache / name
    with only_one_process(cache / f"{name}.lock"):
        if not (home / "bin" / "python").exists():  # also when the Python it was made with has gone
            partial = cache / f"{name}.partial"
            _install(partial)
            shutil.rmtree(home, ignore_errors=True)
            partial.rename(home)
    return home / "bin" / "python"


def _install(directory: Path) -> None:
    # Debian's python3 comes without ensurepip: our own pip can serve the new environment as well.
    venv.create(directory, clear=True, symlinks=True, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python"), "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "--quiet", REQUIREMENT], capture_output=True, text=True)
    if done.returncode != 0:
        raise FetchError(
            f"{REQUIREMENT} cannot be installed for the tests that share a database with it:\n{done.stderr.strip()}"
        )
