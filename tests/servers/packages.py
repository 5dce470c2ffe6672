"""Server programs out of Debian packages, without root and without touching the system.

`fetch` gives apt a private state directory: its own package lists, its own idea of what is installed (nothing), its own
download cache. So apt works out the whole set of packages a server needs, down to libc, checks their signatures, and
downloads them from whatever mirror this machine is configured for. They are unpacked, never installed, into a cache
directory that later runs share; delete that directory to fetch newer versions.
"""

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Taken after the machine's own settings, so its proxies and credentials stay in force, but not its pins and hooks.
APT_CONF = """\
Dir::State "{apt}/state";
Dir::State::status "{apt}/status";
Dir::Cache "{apt}/cache";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "3";
Debug::NoLocking "true";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Install-Pkgs;
"""

# A program from another suite needs that suite's libc, and that libc's own loader.
WRAPPER = """\
#!/bin/sh
exec "{loader}" --library-path "{libraries}" "{program}" "$@"
"""

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class FetchError(Exception):
    """The packages cannot be had on this machine; the message says why."""


def fetch(name: str, *, packages: list[str], programs: list[str], suite: str | None = None) -> Path:
    """Return the `usr` directory of PACKAGES and all they depend on, downloading them on first use.

    PROGRAMS are the executables (patterns below `usr`) that will be run. SUITE is Debian's suite to take the packages
    from; by default they come from the machine's own.
    """
    cache = cache_directory()
    home = cache / name
    with only_one_process(cache / f"{name}.lock"):
        if not home.exists():
            partial = cache / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _download(packages, suite, apt=partial / "apt")
            _unpack(partial / "apt" / "cache" / "archives", root=partial)
            shutil.rmtree(partial / "apt")
            _wrap(programs, root=partial, home=home)
            partial.chmod(0o755)
            partial.rename(home)
    return home / "usr"


def cache_directory() -> Path:
    """Root's servers run as another user, who cannot look into root's home: root caches where everybody can read."""
    if os.getuid() == 0:
        parent = Path("/var/cache")
    else:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = parent / "romancy-test-servers"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"no place to unpack packages: {error}; set XDG_CACHE_HOME to a writable directory") from error
    if os.getuid() == 0:
        cache.chmod(0o755)
    return cache


@contextlib.contextmanager
def only_one_process(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(packages: list[str], suite: str | None, *, apt: Path) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FetchError(f"there is no {tool} on this machine to fetch {', '.join(packages)} with")
    for directory in ("state/lists/partial", "cache/archives/partial"):
        (apt / directory).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(APT_CONF.format(apt=apt))

    # Some of the machine's repositories may not answer; that matters only if the packages are not to be had then.
    complaints = _apt(apt, "update", check=False).stderr
    try:
        if suite is not None:
            _use_suite(suite, apt=apt)
        _apt(apt, "install", "--yes", "--download-only", *packages)
    except FetchError as error:
        raise FetchError(f"{error}\n{complaints}".strip()) from error


def _use_suite(suite: str, *, apt: Path) -> None:
    """Replace the machine's suites by another one from the same mirror."""
    sources = apt / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING} check-valid-until=no] {_configured_mirror(apt)} {suite} main\n")
    with (apt / "apt.conf").open("a") as conf:
        conf.write(f'Dir::Etc::sourcelist "{sources}";\nDir::Etc::sourceparts "/dev/null";\n')
    _apt(apt, "update", "-o", "APT::Update::Error-Mode=any")


def _apt(apt: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["apt-get", "-q", "-c", str(apt / "apt.conf"), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise FetchError(f"apt-get {' '.join(arguments)} failed:\n{done.stderr.strip()}")
    return done


def _configured_mirror(apt: Path) -> str:
    """The mirror from which this machine takes its own release."""
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    listing = _apt(apt, "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages").stdout
    for line in listing.splitlines():
        name, _, uri = line.partition(" ")
        if name == codename:
            return uri
    raise FetchError(f"apt is configured with no mirror for this machine's release {codename!r}")


def _unpack(archives: Path, *, root: Path) -> None:
    for archive in sorted(archives.glob("*.deb")):
        # Perl is only there for maintainer scripts, which do not run here.
        if not archive.name.startswith(("perl", "libperl")):
            subprocess.run(["dpkg-deb", "--extract", archive, root], check=True)
    for unread in ("doc", "man", "locale"):
        shutil.rmtree(root / "usr" / "share" / unread, ignore_errors=True)


def _wrap(programs: list[str], *, root: Path, home: Path) -> None:
    """Put a script in each program's place that starts it with the libraries it came with."""

    def at_home(path: Path) -> Path:
        return home / path.relative_to(root)

    loader = next(path for pattern in ("lib", "usr/lib") for path in root.glob(f"{pattern}/*/ld-linux*.so.*"))
    libraries = [*root.glob("lib/*-linux-gnu*"), *root.glob("usr/lib/*-linux-gnu*")]
    for pattern in programs:
        for program in root.glob(f"usr/{pattern}"):
            binary = program.with_name(f"{program.name}.bin")
            program.rename(binary)
            program.write_text(
                WRAPPER.format(
                    loader=at_home(loader),
                    libraries=":".join(str(at_home(path)) for path in libraries),
                    program=at_home(binary),
                )
            )
            program.chmod(0o755)
