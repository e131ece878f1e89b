"""What `coterie compose --monitoring` adds: Prometheus, which reads the servers' metrics, and Grafana, which shows them.

Both are services of the profile `monitoring`. They read files of a folder beside the Compose file, since docker-compose 1.29 has no inline
files. Prometheus shares a network with the servers alone, Grafana one with Prometheus alone. Only Grafana is on a network that is not
internal, for the port on this machine. Grafana shows its pages to everybody who reaches that port, and has no logins.
"""

from collections.abc import Callable
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.session.tls import CA, CERTIFICATE, KEY
from coterie_deploy.containers.member_commands import CERTIFICATES, METRICS_PORT, PROMETHEUS
from coterie_deploy.containers.members import Plan
from coterie_deploy.containers.plain_yaml import as_yaml

GRAFANA = "grafana"
DATA_SOURCE = {"type": "prometheus", "uid": "coterie-prometheus"}  # by which the panels of the dashboard name it
PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.13.5", "grafana/grafana:13.1.1"
PROMETHEUS_USER = 65534  # of its image
METRICS, _DASHBOARD, _BROWSER = "metrics", "dashboard", "browser"
NETWORKS: dict[str, Any] = {METRICS: {"internal": True}, _DASHBOARD: {"internal": True}, _BROWSER: {}}
VOLUMES = (PROMETHEUS, GRAFANA)
SCRAPE_EVERY_S = 2
_PLACE = "127.0.0.1:3000"
URL = f"http://{_PLACE}"
_PROFILE = {"profiles": ["monitoring"]}
_SCRAPE, _SOURCES, _BOARDS, _BOARD = "prometheus.yml", "datasources.yml", "dashboards.yml", "coterie.json"
_BOARD_FOLDER = "/etc/grafana/dashboards"
_SETTINGS = {
    "GF_AUTH_ANONYMOUS_ENABLED": "true",
    "GF_AUTH_BASIC_ENABLED": "false",
    "GF_AUTH_DISABLE_LOGIN_FORM": "true",
    "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
    "GF_ANALYTICS_REPORTING_ENABLED": "false",
    "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
    "GF_NEWS_NEWS_FEED_ENABLED": "false",
    "GF_PLUGINS_PREINSTALL_DISABLED": "true",
    "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{_BOARD_FOLDER}/{_BOARD}",
}
Bind = Callable[[Path, str], dict[str, Any]]  # of a file to its place in a container


def folder_of(output: Path | None) -> Path:
    """Where the files are: beside the Compose file, with its name."""
    return Path("monitoring") if output is None else output.with_name(f"{output.stem}.monitoring")


def services(plan: Plan, output: Path | None, bind: Bind) -> dict[str, dict[str, Any]]:
    """Prometheus and Grafana."""
    folder = folder_of(output)
    mounts = [_volume(PROMETHEUS, "/prometheus"), bind(folder / _SCRAPE, "/etc/prometheus/prometheus.yml")]
    if plan.asked.certificates is not None:
        mounts.append(bind(plan.asked.certificates / PROMETHEUS, CERTIFICATES))
    provisioning = "/etc/grafana/provisioning"
    shown = [
        _volume(GRAFANA, "/var/lib/grafana"),
        bind(folder / _SOURCES, f"{provisioning}/datasources/coterie.yml"),
        bind(folder / _BOARDS, f"{provisioning}/dashboards/coterie.yml"),
        bind(folder / _BOARD, f"{_BOARD_FOLDER}/{_BOARD}"),
    ]
    place = {"networks": [_DASHBOARD, _BROWSER], "ports": [f"{_PLACE}:3000"]}
    return {
        PROMETHEUS: {**_PROFILE, "image": PROMETHEUS_IMAGE, "networks": [METRICS, _DASHBOARD], "volumes": mounts},
        GRAFANA: {**_PROFILE, "image": GRAFANA_IMAGE, "environment": _SETTINGS, **place, "volumes": shown},
    }


def _volume(name: str, target: str) -> dict[str, Any]:
    return {"type": "volume", "source": name, "target": target}


def files(plan: Plan) -> dict[str, str]:
    """The files of both, by name."""
    source = {"name": "Prometheus", **DATA_SOURCE, "access": "proxy", "url": f"http://{PROMETHEUS}:9090", "isDefault": True}
    source["jsonData"] = {"timeInterval": f"{SCRAPE_EVERY_S}s"}
    provider = {"name": "coterie", "type": "file", "updateIntervalSeconds": 60, "options": {"path": _BOARD_FOLDER}}
    return {
        _SCRAPE: as_yaml(_scrape_configuration(plan)),
        _SOURCES: as_yaml({"apiVersion": 1, "datasources": [source]}),
        _BOARDS: as_yaml({"apiVersion": 1, "providers": [provider]}),
        _BOARD: resources(__package__).joinpath("dashboard.json").read_text(encoding="utf-8"),
    }


def _scrape_configuration(plan: Plan) -> dict[str, Any]:
    """All servers are read; without certificates in plain text, like everything else then."""
    every = f"{SCRAPE_EVERY_S}s"
    secured: dict[str, Any] = {}
    if plan.is_secured:
        own = {"ca_file": CA, "cert_file": CERTIFICATE, "key_file": KEY}
        secured = {"scheme": "https", "tls_config": {key: f"{CERTIFICATES}/{name}" for key, name in own.items()}}
    targets = [f"{server.name}:{METRICS_PORT}" for server in plan.servers]
    job = {"job_name": "coterie", **secured, "static_configs": [{"targets": targets, "labels": {"experiment": plan.name}}]}
    return {"global": {"scrape_interval": every, "scrape_timeout": every}, "scrape_configs": [job]}


def write_files(plan: Plan, output: Path | None) -> None:
    """Writes the files. ConfigError when there is no place for them."""
    if output is None:
        raise ConfigError("--monitoring writes files beside the Compose file, want one with --output FILE")
    folder = folder_of(output)
    try:
        folder.mkdir(exist_ok=True)
        for name, text in files(plan).items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error
