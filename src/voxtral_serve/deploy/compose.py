"""The compose file of one replica for each GPU of a host, with nginx in front. Made of the service in compose.yaml.

What holds for one server holds for each replica, so it is written once, in compose.yaml. A replica differs in its GPU,
its cache (two servers must not write one), its port, which only nginx has, its name in the log, and a name in the
network's DNS that all replicas share.
"""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE, SERVICE = "compose.yaml", "realtime"
IMAGE = "nginx:1.28.3"  # at least 1.27.3, which has `resolve`
NGINX_UID = "101:101"  # of that image
# 100 of the longest bodies at a time; without a size, a tmpfs takes half of the host's memory.
BODIES = "4g"
NAME = "replicas"  # in the network's DNS: the addresses of all of them
PORT = 8000
MONITORING = ("prometheus", "grafana")
HEAD = """\
# Made from {source} by `voxtral-serve replicas {arguments}`: one server on each GPU, and nginx in front.
#   docker compose -f compose.replicas.yaml up -d
# docs/pages/replicas.md describes it. deploy/nginx has the configuration of nginx with the reason for each value.
"""


class ComposeError(ValueError):
    """The compose file cannot be made. The message says why."""


def gpu_ids(text: str) -> list[str]:
    """The GPUs in `0,1,2`: indices, or ids as nvidia-smi -L prints them. Raises ComposeError."""
    gpus = text.split(",")
    for gpu in gpus:
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w-]+", gpu, re.ASCII):
            raise ComposeError(f"--gpus has {gpu!r}: expected indices or ids of `nvidia-smi -L`, such as 0,1,2")
        if gpus.count(gpu) > 1:
            raise ComposeError(f"--gpus has {gpu} twice: a replica takes a whole GPU")
    return gpus


def compose(folder: Path, gpus: Sequence[str], config: str, tls: bool) -> str:
    """The text of the file, for the folder that has compose.yaml. Raises ComposeError.

    `config` is the profile, a path in the image. With `tls`, nginx also listens on 443, with ./tls.crt and ./tls.key.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]

    path = folder / SOURCE
    if not path.is_file():
        raise ComposeError(f"{path} does not exist: run this in the folder of the repository")
    source = yaml.safe_load(path.read_text(encoding="utf-8"))
    services = {f"replica-{number}": _replica(source, number, gpu, config) for number, gpu in enumerate(gpus)}
    caches = [f"{name}-cache" for name in services]
    services |= {"proxy": _proxy(tls)} | {name: source["services"][name] for name in MONITORING}
    content = {
        "name": "voxtral-replicas",
        "services": services,
        "secrets": source["secrets"],
        "volumes": dict.fromkeys([*caches, *MONITORING]),
    }

    class Plain(yaml.SafeDumper):  # type: ignore[misc,unused-ignore]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    arguments = f"--gpus {','.join(gpus)} --config {config}{' --tls' if tls else ''}"
    head = HEAD.format(arguments=arguments, source=SOURCE)
    return head + str(yaml.dump(content, Dumper=Plain, sort_keys=False, width=120))


def _replica(source: Any, number: int, gpu: str, config: str) -> dict[str, Any]:
    service: dict[str, Any] = copy.deepcopy(source["services"][SERVICE])
    del service["ports"]
    service["command"] = ["--config", config]
    service["deploy"]["resources"]["reservations"]["devices"] = [
        {"driver": "nvidia", "device_ids": [gpu], "capabilities": ["gpu"]}
    ]
    service["volumes"] = [
        f"replica-{number}-cache:/cache" if each.endswith(":/cache") else each for each in service["volumes"]
    ]
    service["environment"]["VOXTRAL_SERVE_REPLICA"] = f"replica-{number}"
    service["networks"] = {"default": {"aliases": [NAME]}}
    return service


def _proxy(tls: bool) -> dict[str, Any]:
    nginx = "./deploy/nginx"
    files = {
        f"{nginx}/nginx.conf": "/etc/nginx/nginx.conf",
        f"{nginx}/upstreams.conf.template": "/etc/nginx/templates/upstreams.conf.template",
    }
    if tls:
        files |= {f"{nginx}/tls.conf": "/etc/nginx/tls/tls.conf"}
        files |= {f"./{name}": f"/etc/nginx/tls/{name}" for name in ("tls.crt", "tls.key")}
    return {
        "image": IMAGE,
        "restart": "unless-stopped",
        "user": NGINX_UID,
        "read_only": True,
        "tmpfs": [f"/tmp:size={BODIES}"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "stop_grace_period": "60s",
        "ports": [f"{PORT}:{PORT}", *(["443:8443"] if tls else [])],
        "environment": {
            # Of the image's entrypoint, which fills in the template.
            "NGINX_ENTRYPOINT_LOCAL_RESOLVERS": "1",
            "NGINX_ENVSUBST_OUTPUT_DIR": "/tmp",
            "VOXTRAL_UPLOADS": f"{NAME}:{PORT}",
            "VOXTRAL_LIVE": f"{NAME}:{PORT}",
        },
        "volumes": [f"{here}:{there}:ro,z" for here, there in files.items()],
    }
