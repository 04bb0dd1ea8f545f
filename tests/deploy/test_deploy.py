"""What can be checked of deploy/ without a container runtime: it parses, and its parts name each other rightly."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from sparseserve_jax.server.metrics import Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    page = Metrics("sparseserve", "m", lambda state: 0).render().decode()
    known = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"][1:]]
    asked = {name for query in queries for name in re.findall(r"sparseserve:\w+", query)}
    assert len(asked) > 20
    assert asked <= known


def test_panels_do_not_overlap_and_have_descriptions() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["description"].endswith(".")
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_parenthesis_of_a_query_is_closed() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for opening, closing in ("()", "{}", "[]"):
                assert target["expr"].count(opening) == target["expr"].count(closing)
            assert "{" in target["expr"]


def test_compose_names_what_there_is() -> None:
    stages = set(re.findall(r"^FROM .* AS (\w+(?:-\w+)?)$", DOCKERFILE, re.MULTILINE))
    for name in ("server", "cuda"):
        service = COMPOSE["services"][name]
        assert service["build"]["target"] in stages
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    for service in COMPOSE["services"].values():
        assert set(service["secrets"]) <= set(COMPOSE["secrets"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])  # open to others only by choice


def test_prometheus_and_grafana_find_each_other() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    for name in ("server", "cuda"):
        assert host in COMPOSE["services"][name]["networks"]["default"]["aliases"]
    assert f'"--port", "{port}"' in DOCKERFILE and f"127.0.0.1:{port}/health" in DOCKERFILE
    folder = DEPLOY / "grafana/provisioning"
    source = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((folder / "dashboards/sparseserve.yaml").read_text())["providers"][0]
    targets = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/dashboard.json" in targets


def test_the_image_has_what_the_package_is_built_from() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", "setup.py", project["project"]["readme"], "LICENSE"} == kept
    extras = {name for found in re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE) for name in found.split(",")}
    assert {"server"} < extras <= set(project["project"]["optional-dependencies"])
    makefile = (ROOT / "Makefile").read_text()
    (model,) = re.findall(r"^MODEL \?= (\S+)$", makefile, re.MULTILINE)
    assert DOCKERFILE.count(model) == 2


def test_the_image_runs_without_root() -> None:
    final = DOCKERFILE[DOCKERFILE.index("AS runtime") :]
    assert re.findall(r"^USER (\d+)$", final, re.MULTILINE) == ["10001"]
    assert "HEALTHCHECK" in final
