"""The files of a Ray cluster in `configs/deploy`: what Ray's launcher and Serve accept of them, and
whether what has to agree does."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray.serve")

from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from aioinfer.config import load_config
from aioinfer.deploy.application import Arguments

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "configs" / "deploy"


def test_the_launcher_takes_the_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does what `ray up` does before it connects to a host."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # the launcher keeps its state there
    cluster = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    prepared = prepare_config(cluster)
    validate_config(prepared)
    assert prepared["max_workers"] == len(cluster["provider"]["worker_ips"])
    assert any("--head" in line for line in prepared["head_start_ray_commands"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {"gpu", "ray"} <= set(extras)
    with pytest.raises(Exception, match="unknown_key"):
        validate_config(prepared | {"unknown_key": 1})


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def test_serve_takes_the_application(documents: list[dict[str, Any]]) -> None:
    service, _ = documents
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    embedded = ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = embedded.applications
    arguments = Arguments.model_validate(application.args)
    config = load_config(ROOT / str(arguments.config), arguments.set)
    own = yaml.safe_load((ROOT / "configs" / "serve.yaml").read_text())
    assert application.import_path == own["applications"][0]["import_path"]
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert arguments.gpus_per_replica == gpus == config.parallel.world_size
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert (group["minReplicas"], group["maxReplicas"]) == (
        arguments.min_replicas, arguments.max_replicas,
    )  # fmt: skip
    assert arguments.gateways <= group["minReplicas"]  # each on a node of its own


def test_the_service_reaches_the_gateways(documents: list[dict[str, Any]]) -> None:
    """Its selector is the workers' label, its port their gateways', and the probe asks these."""
    ray_service, service = documents
    (group,) = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    template = group["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    (port,) = container["ports"]
    (served,) = service["spec"]["ports"]
    assert served["targetPort"] == port["name"] == container["readinessProbe"]["httpGet"]["port"]
    assert "server.port=" + str(port["containerPort"]) in ray_service["spec"]["serveConfigV2"]
    head = ray_service["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert all(isinstance(value, str) for value in head["rayStartParams"].values())
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
