"""The image serves as its base would, refuses what it says it refuses, and ends as an orchestrator expects."""

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
from places import DATA, ROOT

import voxtral_serve
from bench import dataset
from bench.client import Client, Row
from bench.measure import engine
from container.conftest import KEY, VLLM, Container, build, flags, run, running

SAMPLES = 12
LONGEST_S = 37  # of the context of 512
MANY = 8  # requests
LOGGED = re.compile(r"^(?:\((\w+) pid=\d+\) )?.*voxtral-serve patches: (.+)$", re.MULTILINE)


def transcribe(url: str, clips: Sequence[dataset.Clip], key: str | None = None) -> list[Row]:
    client = Client(url, timeout_s=120, api_key=key)
    client.model = "voxtral"
    return [client.transcribe(clip, part=1) for clip in clips]


@pytest.fixture(scope="module")
def clips() -> list[dataset.Clip]:
    return dataset.select(dataset.load(DATA)[0], SAMPLES, seed=0)


@pytest.fixture(scope="module")
def served(image: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """By the README's command: the contest's config, which asks for no key."""
    cache = tmp_path_factory.mktemp("cache") / "cache"
    with running("voxtral-test", image, flags(model, cache), "--config", "vllm_config.yaml") as container:
        yield container


@pytest.fixture
def keyed(image: str, model: Path, tmp_path: Path) -> Iterator[Container]:
    """With a key from a file, as compose mounts it."""
    secret = tmp_path / "api_key"
    secret.write_text(KEY + "\n")
    secret.chmod(0o444)
    tmp_path.chmod(0o755)
    options = [*flags(model, tmp_path / "cache"), "-v", f"{secret}:/run/secrets/api_key:ro"]
    options += ["-e", "VLLM_API_KEY_FILE=/run/secrets/api_key"]
    port = engine.free_port()
    with running("voxtral-keyed", image, options, "--config", "key.yaml", "--port", str(port), port=port) as container:
        yield container


# ---- The image


def test_no_secret_is_in_a_layer(image: str, base: str) -> None:
    """Nor in its config: the context had the key in seven files that no image should have."""

    def layers(name: str) -> list[str]:
        data = json.loads(run("podman", "image", "inspect", name).stdout)[0]["GraphDriver"]["Data"]
        return [data["UpperDir"], *filter(None, data.get("LowerDir", "").split(":"))]

    ours = set(layers(image)) - set(layers(base))
    assert len(ours) >= 6
    found = run("grep", "-rlF", KEY, *ours, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert (
        KEY
        not in run("podman", "image", "inspect", image).stdout + run("podman", "history", "--no-trunc", image).stdout
    )


def test_the_image_says_what_it_is(image: str, base: str) -> None:
    (config,) = json.loads(run("podman", "image", "inspect", image).stdout)
    assert config["Config"]["User"] == "10001:10001"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "voxtral-serve"
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.version"] == voxtral_serve.__version__
    assert labels["voxtral-serve.vllm"] == VLLM


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        (
            "0.99",
            "VLLM is 0.99: expected the version of one of requirements/container-0.20.0.txt "
            "requirements/container-0.32.0.txt",
        ),
        ("0.32.0", f"VLLM is 0.32.0, but BASE_IMAGE has vLLM {VLLM}: expected the same"),
    ],
)
def test_a_vllm_that_is_not_known_or_not_in_the_base(
    vllm: str, message: str, context: Path, wheels: Path, base: str
) -> None:
    done = build(context, wheels, base, vllm=vllm, check=False)
    assert done.returncode != 0
    assert message in (done.stdout + done.stderr).splitlines()


def test_a_patch_that_does_not_fit_ends_the_build(context: Path, wheels: Path, base: str, tmp_path: Path) -> None:
    """A base whose transformers has another name for what is patched."""
    file = "/usr/local/lib/python3.12/dist-packages/transformers/tokenization_mistral_common.py"
    (tmp_path / "Dockerfile").write_text(
        f"FROM {base}\nRUN sed -i 's/def from_pretrained(/def load_pretrained(/' {file}\n"
    )
    drifted = "localhost/voxtral-serve-drifted"
    run("buildah", "bud", "--isolation", "chroot", "--format", "docker", "-t", drifted, tmp_path)
    try:
        done = build(context, wheels, drifted, check=False)
    finally:
        run("podman", "rmi", "--force", drifted)
    assert done.returncode != 0
    assert "PatchError: patch from_pretrained (of transformers.tokenization_mistral_common) has drifted" in (
        done.stdout + done.stderr
    )


def test_a_model_is_baked_in(context: Path, wheels: Path, base: str, model: Path, image: str) -> None:
    """`image` is there so that the layers are."""
    baked = "localhost/voxtral-serve-baked"
    build(context, wheels, base, "--target", "with-model", "--build-context", f"model={model}", "-t", baked)
    words = ("--network", "none", "-e", "VLLM_CPU_KVCACHE_SPACE=1", "--no-healthcheck", "--entrypoint", "voxtral-serve")
    done = run("podman", "run", "--rm", *words, baked, "check", "--config", "vllm_config.yaml")
    assert done.stdout.endswith("ok: this configuration can be served\n")
    assert "  directory         /model\n" in done.stdout
    run("podman", "rmi", "--force", baked)


# ---- Serving


def test_it_runs_as_nobody_in_particular_on_a_root_that_it_cannot_write(served: Container) -> None:
    assert served.execute("id", "-u").stdout == "10001\n"
    touched = served.execute("touch", "/opt/x", "/usr/x", "/model/x", check=False)
    assert touched.stderr.count("Read-only file system") == 3


def test_transcripts_are_those_outside_the_container(
    served: Container, model: Path, clips: list[dataset.Clip], tmp_path: Path
) -> None:
    inside = transcribe(served.url, clips)
    assert [row.error for row in inside] == [None] * SAMPLES
    port = engine.free_port()
    with engine.served(model / "vllm_config.yaml", model, port, tmp_path / "server.log"):
        outside = transcribe(f"http://127.0.0.1:{port}", clips)
    # The guard, which is not outside, takes the space off that vLLM puts first.
    assert [row.text for row in inside] == [(row.text or "").strip() for row in outside]


def test_the_health_check(served: Container, image: str) -> None:
    (config,) = json.loads(run("podman", "image", "inspect", image).stdout)
    kind, *words = config["Healthcheck"]["Test"]
    assert kind == "CMD"
    assert served.execute(*words).returncode == 0
    elsewhere = [word.replace("8000", str(engine.free_port())) for word in words]
    assert elsewhere != words
    assert served.execute(*elsewhere, check=False).returncode != 0


def test_every_python_process_has_the_patches(served: Container) -> None:
    """vLLM's say so in the log; what it would start by itself has them however Python is started."""
    logged = LOGGED.findall(served.logs())
    # The API server logs it before it has its name; a CPU's worker is the engine's fork.
    assert {name for name, _ in logged} == {"", "EngineCore"}
    assert all(outcomes.count("applied") >= 3 for _, outcomes in logged)
    ask = "import sys; print(*(type(finder).__name__ for finder in sys.meta_path))"
    for options in ([], ["-I"], ["-E"], ["-P"]):
        assert "PostImport" in served.execute("python3", *options, "-c", ask).stdout
    spawned = f"import multiprocessing as m; m.get_context('spawn').Process(target=exec, args=({ask!r},)).start()"
    assert "PostImport" in served.execute("python3", "-c", spawned).stdout


def test_no_process_compiles_modules_at_its_start(served: Container) -> None:
    """None could keep the bytecode: the root is read-only."""
    rooms = "vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_model_runner, torch._dynamo"
    ask = f"""import os, sys, {rooms}, voxtral_serve.guard, voxtral_serve.engine.encode_once
specs = [module.__spec__ for module in sys.modules.values() if getattr(module, "__spec__", None)]
files = [spec.cached for spec in specs if spec.cached]
print(len(files), [file for file in files if not os.path.exists(file)])"""
    number, _, missing = served.execute("python3", "-c", ask).stdout.splitlines()[-1].partition(" ")
    assert (int(number) > 3000, missing) == (True, "[]")


def test_nothing_besides_the_service_is_exposed(served: Container) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert requests.get(served.url + path, timeout=10).status_code == 404, path


def test_a_second_container_does_not_share_the_port(served: Container, image: str, model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = run("podman", "run", "--rm", *flags(model, tmp_path / "cache"), image, *CONFIGURED, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "voxtral-serve: refused: server: port 8000 is in use: "
        "stop the process that listens on it, or choose another --port"
    )


# ---- The key


def test_the_key_is_asked_for_and_told_to_nobody(keyed: Container, clips: list[dataset.Clip]) -> None:
    assert requests.get(f"{keyed.url}/v1/models", timeout=10).status_code == 401
    (refused,) = transcribe(keyed.url, clips[:1], key="another")
    assert "401" in str(refused.error)
    (row,) = transcribe(keyed.url, clips[:1], key=KEY)
    assert row.error is None
    assert KEY not in keyed.logs()
    assert KEY not in run("ps", "-ww", "-eo", "args").stdout
    assert KEY not in run("podman", "inspect", keyed.name).stdout


# ---- Refusals: one line, status 1, no engine

EDITS = {
    "no weights": lambda model: (model / "consolidated.safetensors").unlink(),
    "half a file": lambda model: (model / "consolidated.safetensors").write_bytes(b"\0" * 1000),
    "half a download": lambda model: (model / "consolidated.safetensors.incomplete").touch(),
    "pointer": lambda model: (model / "consolidated.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1"
    ),
    "shards": lambda model: (model / "consolidated.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"norm.weight": "consolidated-00001-of-00002.safetensors"}})
    ),
    "unreadable": lambda model: (model / "tekken.json").chmod(0o600),
    "closed": lambda model: model.chmod(0o700),
    "option": lambda model: (model / "vllm_config.yaml").write_text("model: .\nmax_num_sequences: 1\n"),
    "": lambda model: None,
}
CONFIGURED = ("--config", "vllm_config.yaml")
DRIFTED = "/usr/local/lib/python3.12/dist-packages/transformers/tokenization_mistral_common.py"
REFUSALS = {
    "no checkpoint": ("no weights", CONFIGURED, {}, "checkpoint: /model contains no checkpoint: expected params.json"),
    "truncated": ("half a file", CONFIGURED, {}, "consolidated.safetensors is not a complete safetensors file"),
    "half downloaded": ("half a download", CONFIGURED, {}, "consolidated.safetensors.incomplete is an incomplete"),
    "LFS": ("pointer", CONFIGURED, {}, "is a Git LFS pointer, not the file itself"),
    "shards": ("shards", CONFIGURED, {}, "consolidated-00001-of-00002.safetensors is missing, but"),
    "file not readable": ("unreadable", CONFIGURED, {}, "cannot be read by uid 10001 (tekken.json is not readable)"),
    "mount not readable": ("closed", ("--config", "/opt/voxtral-serve/vllm_config.yaml"), {},
                           "/model cannot be read by uid 10001 (Permission denied)"),
    "unknown key": ("option", CONFIGURED, {"VLLM_API_KEY": KEY}, "max_num_sequences is not an option of vllm serve"),
    "unknown option": ("", (*CONFIGURED, "--max-model-length", "1"), {}, "did you mean max_model_len?"),
    "no config": ("", ("--config", "none.yaml"), {}, "config: none.yaml does not exist"),
    "no key": ("", ("--config", "key.yaml"), {}, "server: no API key: set VLLM_API_KEY, or set VLLM_API_KEY_FILE"),
    "key as a word": ("", (*CONFIGURED, "--api-key", KEY), {}, "server: the option api_key is set"),
    "no key file": ("", CONFIGURED, {"VLLM_API_KEY_FILE": "/none"}, "API key: /none is not there, or not for uid"),
    "no memory": ("", CONFIGURED, {"VLLM_CPU_KVCACHE_SPACE": "100000"}, "Profiles that fit: none"),
    "no audio": ("", CONFIGURED, {"PYTHONPATH": "/broken"}, "audio: this Python lacks what reads audio files"),
    "no cache": ("", CONFIGURED, {"HOME": "/nowhere"}, "cache: /nowhere cannot be written by uid 10001"),
    "Hub": ("", ("mistralai/Voxtral-Mini-4B-Realtime-2602", *CONFIGURED), {}, "is not a local directory"),
    "drifted patch": ("", CONFIGURED, {}, "patches: patch from_pretrained (of transformers."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_it_refuses(name: str, image: str, model: Path, tmp_path: Path) -> None:
    edit, words, environment, message = REFUSALS[name]
    tmp_path.chmod(0o755)
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    EDITS[edit](copy)
    options = flags(copy, tmp_path / "cache")
    for variable, value in environment.items():
        options += ["-e", f"{variable}={value}"]
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "soundfile.py").write_text("raise ImportError")
    options += ["-v", f"{broken}:/broken:ro"]
    if name == "drifted patch":
        source = run("podman", "run", "--rm", "--no-healthcheck", "--entrypoint", "cat", image, DRIFTED).stdout
        changed = tmp_path / "changed.py"
        changed.write_text(source.replace("def from_pretrained(", "def load_pretrained("))
        options += ["-v", f"{changed}:{DRIFTED}:ro"]
    port = str(engine.free_port())
    done = run("podman", "run", "--rm", *options, image, *words, "--port", port, timeout_s=120, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    refused = [line for line in done.stderr.splitlines() if line.startswith("voxtral-serve: refused: ")]
    assert message in refused[0], done.stderr
    assert len(refused) == 1, refused
    assert KEY not in done.stderr


def test_what_reads_audio_is_installed_on_demand(image: str, model: Path, wheels: Path, tmp_path: Path) -> None:
    """From this machine's wheels; it then goes on, to where there is no key."""
    tmp_path.chmod(0o755)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/soundfile.py").write_text("raise ImportError")
    wheels.chmod(0o755)
    options = [*flags(model, tmp_path / "cache"), "-v", f"{tmp_path}/broken:/broken:ro", "-e", "PYTHONPATH=/broken"]
    options += ["-v", f"{wheels}:/wheels:ro", "-v", f"{wheels}/pip.conf:/etc/pip.conf:ro"]
    options += ["-e", "VOXTRAL_SERVE_INSTALL_AUDIO=1"]
    done = run("podman", "run", "--rm", *options, image, "--config", "key.yaml", check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("voxtral-serve: ")]
    assert lines[0].startswith("voxtral-serve: installing what reads audio files into /cache/audio, over the network")
    assert any("refused: server: no API key" in line for line in lines[1:])
    assert (tmp_path / "cache/audio/soundfile.py").is_file()


# ---- Ends


def longest(url: str, results: list[object]) -> None:
    """One request that takes seconds; what came of it goes into `results`."""
    import io

    import soundfile

    file = io.BytesIO()
    samples, rate = soundfile.read(DATA / "clips/001.opus", dtype="float32")
    # The model says no EOS in noise, so this takes all the tokens that it may; without speech it would not be asked.
    noise = np.random.default_rng(0).normal(0, 0.1, LONGEST_S * rate - len(samples))
    soundfile.write(file, np.concatenate([samples, noise]), rate, format="WAV")
    try:
        answer = requests.post(
            f"{url}/v1/audio/transcriptions",
            files={"file": ("clip.wav", file.getvalue())},
            data={"model": "voxtral"},
            timeout=120,
        )
        results.append(answer.status_code)
    except requests.RequestException as error:
        results.append(error)


def in_flight(url: str) -> float:
    text = requests.get(f"{url}/metrics", timeout=10).text
    return float(re.findall(r"^vllm:num_requests_running\{.*?\} (\S+)$", text, re.MULTILINE)[0])


def begin(url: str, count: int = 1) -> tuple[threading.Thread, list[object]]:
    """Send so many requests at once. The thread ends with the last of them, and then `results` has one for each."""
    results: list[object] = []

    def send() -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: longest(url, results), range(count)))

    thread = threading.Thread(target=send)
    thread.start()
    end = time.monotonic() + 30
    while in_flight(url) == 0:
        assert time.monotonic() < end and thread.is_alive(), results
        time.sleep(0.05)
    return thread, results


@pytest.fixture
def ending(image: str, model: Path, tmp_path: Path) -> Iterator[Container]:
    tmp_path.chmod(0o755)
    port = engine.free_port()
    options = flags(model, tmp_path / "cache")
    words = ("--config", "vllm_config.yaml", "--port", str(port))
    with running("voxtral-ending", image, options, *words, port=port) as container:
        yield container


def test_sigterm_lets_a_running_request_finish(ending: Container) -> None:
    thread, results = begin(ending.url)
    run("podman", "kill", "--signal", "TERM", ending.name)
    thread.join(60)
    assert results == [200], ending.logs()[-4000:]
    assert ending.wait() == 0


def test_a_dead_engine_ends_the_container(ending: Container) -> None:
    top = run("podman", "top", ending.name, "hpid", "args").stdout.splitlines()
    (engine,) = [line.split()[0] for line in top if "EngineCore" in line]
    thread, results = begin(ending.url, MANY)  # which run one after the other: the first may have ended by now
    subprocess.run(["kill", "-9", engine], check=True)
    assert ending.wait() not in (0, 137)
    thread.join(30)
    assert len(results) == MANY and results.count(200) < MANY


def test_sigterm_while_it_starts(image: str, model: Path, tmp_path: Path) -> None:
    """A first process has no default action for a signal; it must not take the orchestrator's patience to end."""
    tmp_path.chmod(0o755)
    port = str(engine.free_port())
    run("podman", "rm", "--force", "--ignore", "voxtral-early")
    run(
        "podman", "run", "--detach", "--name", "voxtral-early", *flags(model, tmp_path / "cache"), image,
        "--config", "vllm_config.yaml", "--port", port,
    )  # fmt: skip
    try:
        time.sleep(2)
        run("podman", "kill", "--signal", "TERM", "voxtral-early")
        assert int(run("podman", "wait", "voxtral-early", timeout_s=40).stdout) == 143
    finally:
        run("podman", "rm", "--force", "--ignore", "--time", "5", "voxtral-early")


def test_the_commands_of_the_readme_are_those_that_are_tested() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docker build -t vllm-voxtral ." in readme
