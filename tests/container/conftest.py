"""The image as the Dockerfile makes it, on a base with vLLM for a CPU, and containers of it, by Debian's own tools.

No daemon, no registry: buildah builds without isolation but chroot, runc runs, the network is the host's. So a server's
port is one of this machine; 8000 must be free. What needs an NVIDIA GPU is not tested here: that the official image is
what the Dockerfile takes it for, `--gpus all`, and the two refusals that ask NVML (tests/unit/test_check.py has those).
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import requests
import yaml
from places import CONFIG, PICO, ROOT

Done = subprocess.CompletedProcess[str]
COMMANDS = ("buildah", "podman", "runc", "newuidmap", "debootstrap", "gpg")
PACKAGES = Path(yaml.__file__).parent.parent  # this environment's site-packages
HERE = Path(__file__).parent
IMAGE = "localhost/voxtral-serve-test"
VLLM = "0.20.0"  # of the base image
KEY = "k3y-of-the-test"
START_S, STOP_S = 300, 120
# What a container of Docker has by default and is not there without systemd, or not allowed here.
SETTINGS = """
[containers]
netns = "host"
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


@pytest.fixture(scope="session", autouse=True)
def tools(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not version("vllm").startswith(VLLM):
        pytest.exit(f"the base image gets vLLM {VLLM}: run these tests with `make test-container`", returncode=2)
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing or os.geteuid() != 0:
        pytest.exit(
            f"`make test-container` needs root (uid {os.geteuid()}) and {', '.join(missing) or 'nothing else'}: "
            "apt-get install buildah podman runc uidmap debootstrap gpg",
            returncode=2,
        )
    settings = tmp_path_factory.mktemp("containers") / "containers.conf"
    settings.write_text(SETTINGS)
    os.environ["CONTAINERS_CONF"] = str(settings)


def run(*words: object, timeout_s: float = 600, check: bool = True) -> Done:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=timeout_s)
    if check and done.returncode != 0:
        pytest.fail(
            f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout[-6000:]}{done.stderr[-6000:]}"
        )
    return done


@pytest.fixture(scope="session")
def base() -> str:
    """Made once, and anew when what it is made of changes."""
    content = (HERE / "base.sh").read_bytes() + (ROOT / "requirements/pinned.txt").read_bytes()
    name = f"localhost/voxtral-serve-base:{hashlib.sha256(content).hexdigest()[:12]}"
    if run("podman", "image", "exists", name, check=False).returncode != 0:
        run("sh", HERE / "base.sh", name, PACKAGES, timeout_s=1800)
    return name


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the builds fetch, fetched where pip is configured for this machine, and checked by hash there and here."""
    directory = tmp_path_factory.mktemp("wheels")
    for lock in (*ROOT.glob("requirements/container-[0-9]*.txt"), ROOT / "requirements/wheel.txt"):
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", lock, "-d", directory)
    (directory / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    return directory


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as git has it, with what may lie about in a checkout and must not get into an image."""
    directory = tmp_path_factory.mktemp("context")
    files = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file() and not name.startswith(("bench/", "tests/", "pico/")):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name, follow_symlinks=False)
    for name in ("api_key.txt", ".env", ".netrc", ".git/config", "src/../model/token", "requirements/pip.conf"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(KEY)
    return directory


def build(context: Path, wheels: Path, base: str, *words: object, vllm: str = VLLM, check: bool = True) -> Done:
    mounts = ("--volume", f"{wheels}:/wheels:ro", "--volume", f"{wheels}/pip.conf:/etc/pip.conf:ro")
    return run(
        "buildah", "bud", "--isolation", "chroot", "--format", "docker", "--layers",
        "--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"VLLM={vllm}", *mounts, *words, context,
        timeout_s=1200, check=check,
    )  # fmt: skip


@pytest.fixture(scope="session")
def image(context: Path, wheels: Path, base: str) -> str:
    build(context, wheels, base, "-t", IMAGE)
    return IMAGE


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pico and a vllm_config.yaml, as the README's command wants it.

    The config is the repository's, with the model that vLLM 0.20.0 can run on a CPU.
    """
    directory = tmp_path_factory.mktemp("model") / "pico"
    shutil.copytree(PICO, directory)
    directory.chmod(0o755)
    options = yaml.safe_load(CONFIG.read_text()) | {
        "hf_overrides": {"architectures": ["VoxtralRealtimeEncodeOnce"]},
        "gpu_memory_utilization": 0.3,
    }
    for name, api_key in (("vllm_config.yaml", "none"), ("key.yaml", None)):
        switch = {"voxtral_serve": {"api_key": api_key}} if api_key else {}
        (directory / name).write_text(yaml.safe_dump(options | {"additional_config": switch}))
    return directory


@dataclass(frozen=True)
class Container:
    name: str
    url: str

    def logs(self) -> str:
        done = run("podman", "logs", self.name)
        return done.stdout + done.stderr

    def execute(self, *words: object, check: bool = True) -> Done:
        return run("podman", "exec", self.name, *words, check=check)

    def wait(self) -> int:
        """The exit status, once it has ended."""
        return int(run("podman", "wait", self.name, timeout_s=STOP_S).stdout)

    def state(self) -> dict:
        (state,) = json.loads(run("podman", "inspect", self.name).stdout)
        return state


def flags(model: Path, cache: Path) -> list[str]:
    """The README's, less --gpus and the port's, which is the host's here; with a root that cannot be written to."""
    cache.mkdir(exist_ok=True)
    cache.chmod(0o777)
    return [
        "--read-only", "--tmpfs", "/tmp", "--no-healthcheck", "-v", f"{model}:/model:ro", "-w", "/model",
        "-v", f"{cache}:/cache", "-e", "VLLM_CPU_KVCACHE_SPACE=1", "--shm-size", "1g",
    ]  # fmt: skip


@contextlib.contextmanager
def running(name: str, image: str, options: Sequence[str], *words: object, port: int = 8000) -> Iterator[Container]:
    """A container that answers at `port`, which `words` must have it listen at. Its log is shown if it never does."""
    run("podman", "rm", "--force", "--ignore", name)
    container = Container(name, f"http://127.0.0.1:{port}")
    try:
        run("podman", "run", "--detach", "--name", name, *options, image, *words)
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{container.url}/health", timeout=2).status_code == 200:
                    break
            if time.monotonic() > end or not container.state()["State"]["Running"]:
                pytest.fail(f"{name} does not answer:\n{container.logs()[-8000:]}")
            time.sleep(0.5)
        yield container
    finally:
        remove = ("podman", "rm", "--force", "--ignore", "--time", "5", name)
        if run(*remove, check=False).returncode != 0:  # which may end between podman's looks at it
            run(*remove)
