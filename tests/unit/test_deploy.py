"""What is deployed beside the image fits it, and vLLM: names of metrics, flags, files, ports. Schemas: `make lint`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import vllm
import yaml
from conftest import CONFIG, ROOT

from voxtral_serve.check import Report
from voxtral_serve.check.options import read_options

KUBERNETES = ROOT / "deploy/kubernetes"
ENTRYPOINT = (ROOT / "entrypoint.sh").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def kind(name: str) -> Any:
    (found,) = [each for path in KUBERNETES.glob("*.yaml") if (each := read(path))["kind"] == name]
    return found


def test_the_dashboard_s_metrics_are_vllm_s() -> None:
    sources = [*Path(vllm.__file__).parent.glob("v1/metrics/*.py")]
    known = set(re.findall(r'name="(vllm:\w+)"', "".join(path.read_text() for path in sources)))
    panels = json.loads((ROOT / "deploy/grafana/dashboards/voxtral.json").read_text())["panels"]
    text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    shown = {re.sub(r"_(bucket|total)$", "", name) for name in re.findall(r"vllm:\w+", text)}
    assert len(shown) >= 8
    assert shown - known == set()
    others = set(re.findall(r"\b(http_\w+)\{", text))
    assert others == {"http_requests_total"}  # of prometheus-fastapi-instrumentator, which vLLM sets up


def test_the_dashboard_finds_its_data() -> None:
    (source,) = read(ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    board = json.loads((ROOT / "deploy/grafana/dashboards/voxtral.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    (job,) = read(ROOT / "deploy/prometheus.yml")["scrape_configs"]
    assert f'job="{job["job_name"]}"' in json.dumps(board["templating"]).replace('\\"', '"')
    services = read(ROOT / "compose.yaml")["services"]
    (targets,) = (static["targets"] for static in job["static_configs"])
    assert set(targets) == {f"{name}:8000" for name in services if services[name].get("image") == "vllm-voxtral"}


def test_the_entrypoint_s_flags_are_vllm_s() -> None:
    added = re.findall(r'set -- "\$@" (--.+?)(?: ;;)?$', ENTRYPOINT, re.MULTILINE)
    words = " ".join(added).replace('"${VOXTRAL_SERVE_SHUTDOWN_S:-30}"', "30").split()
    read = read_options(report := Report(), CONFIG, words)
    assert report.problems == []
    assert read is not None
    options = read.values
    assert (options.middleware, options.shutdown_timeout) == (["voxtral_serve.guard.Guard"], 30)
    assert options.disable_fastapi_docs and options.disable_uvicorn_access_log


def test_every_file_that_the_image_is_made_of_gets_to_the_builder() -> None:
    let_in = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    }
    assert copied == let_in
    assert [name for name in copied if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("lock", ["container", "wheel"])
def test_what_the_image_installs_is_pinned_and_hashed(lock: str) -> None:
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    pins = re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
    asked = re.findall(r"^([a-z]+)$", (ROOT / f"requirements/{lock}.in").read_text(), re.MULTILINE)
    assert asked
    assert set(asked) <= set(pins)
    assert len(re.findall(r"==\S+ \\\n    --hash=sha256:", text)) == len(pins)
    # vLLM's own are left alone
    assert not {"numpy", "numba", "llvmlite", "torch", "transformers"} & set(pins)


def commands() -> list[tuple[str, list[str]]]:
    services = read(ROOT / "compose.yaml")["services"]
    (container,) = kind("Deployment")["spec"]["template"]["spec"]["containers"]
    return [(name, each["command"]) for name, each in services.items() if "command" in each] + [
        ("kubernetes", container["args"])
    ]


@pytest.mark.parametrize(("name", "words"), commands())
def test_what_the_containers_run_is_right(name: str, words: list[str]) -> None:
    assert words[0] == "--config"
    read = read_options(report := Report(), ROOT / words[1].lstrip("/"), words[2:])
    assert report.problems == []
    assert read is not None
    assert read.values.model == "."


def test_the_older_model_is_served_as_its_design_says() -> None:
    services = read(ROOT / "compose.yaml")["services"]
    assert services["realtime"]["ports"] == ["8000:8000"]
    assert services["voxtral-3b"]["ports"] == ["8501:8000"]
    profile = read(ROOT / "profiles/voxtral-3b.yaml")
    assert [profile[name] for name in ("max_model_len", "max_num_seqs", "gpu_memory_utilization")] == [4096, 4, 0.15]


def test_both_services_fit_on_one_gpu() -> None:
    shares = [
        read_options(Report(), ROOT / words[1].lstrip("/"), words[2:]).values.gpu_memory_utilization  # type: ignore[union-attr]
        for name, words in commands()
        if name != "kubernetes"
    ]
    assert len(shares) == 2
    assert sum(shares) <= 0.96


def test_kubernetes_parts_name_each_other() -> None:
    pod = kind("Deployment")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    for selector in (
        kind("Deployment")["spec"]["selector"]["matchLabels"],
        kind("Service")["spec"]["selector"],
        kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        kind("ServiceMonitor")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert labels.items() <= kind("Service")["metadata"]["labels"].items()  # the monitor looks for the service
    (port,) = kind("Service")["spec"]["ports"]
    (endpoint,) = kind("ServiceMonitor")["spec"]["endpoints"]
    (exposed,) = container["ports"]
    assert endpoint["port"] == port["name"]
    assert (port["targetPort"], exposed["containerPort"]) == (exposed["name"], 8000)
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
    claims = [
        each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each
    ]
    assert kind("PersistentVolumeClaim")["metadata"]["name"] in claims
    (secret,) = [each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each]
    assert secret == kind("Secret")["metadata"]["name"]


def test_the_secret_is_not_applied_and_all_else_is() -> None:
    applied = set(kind("Kustomization")["resources"])
    files = {path.name for path in KUBERNETES.glob("*.yaml")}
    assert files - applied == {"kustomization.yaml", "secret.example.yaml"}
    assert applied <= files


def test_a_running_request_has_its_time() -> None:
    """The grace that vLLM gives is shorter than the one after which the container is killed."""
    pod = kind("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (given,) = [int(each["value"]) for each in container["env"] if each["name"] == "VOXTRAL_SERVE_SHUTDOWN_S"]
    waited = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert given + waited + 5 <= pod["terminationGracePeriodSeconds"]
    by_default = int(re.findall(r"VOXTRAL_SERVE_SHUTDOWN_S:-(\d+)", ENTRYPOINT)[0])
    compose = read(ROOT / "compose.yaml")["services"]["realtime"]
    assert by_default + 5 <= int(compose["stop_grace_period"].removesuffix("s"))


def test_the_user_is_one_number_everywhere() -> None:
    pod = kind("Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}\n" in DOCKERFILE
    assert f"useradd --uid {pod['runAsUser']} " in DOCKERFILE
