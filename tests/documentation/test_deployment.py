"""The image and compose.yaml, read as files: what is published, who runs what, where secrets come from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.documents import DEPLOYMENT, REPOSITORY

COMPOSE = REPOSITORY / "deploy" / "compose"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
OURS = ("code", "daemon", "webserver")
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::([-?])([^}]*))?\}")


def locked(name: str) -> dict[str, str]:
    """Versions by package, each with its marker."""
    return dict(re.findall(r"^([a-z0-9_.-]+)==([^\\\n]+?) *\\$", (REPOSITORY / name).read_text(), re.MULTILINE))


def test_the_image_installs_what_was_tested() -> None:
    everything, runtime = locked("requirements.lock"), locked("runtime.lock")
    assert len(runtime) > 100 and "dagster" in runtime
    different = {name: (version, everything.get(name)) for name, version in runtime.items()}
    assert {
        name: pair
        for name, pair in different.items()
        if pair[1] is None or pair[0].split(" ;")[0] != pair[1].split(" ;")[0]
    } == {}, "make runtime.lock anew with the command in its header"
    assert not {"pytest", "mypy", "ruff", "uv", "playwright", "xllamacpp"} & set(runtime)


def test_the_runtime_lock_has_what_the_project_asks_for() -> None:
    import tomllib

    asked = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=!~\[ ;]", line)[0].lower() for line in asked}
    assert names - set(locked("runtime.lock")) == set()


def test_every_package_is_checked_by_its_hash_and_no_registry_is_named() -> None:
    text = (REPOSITORY / "runtime.lock").read_text()
    assert all("--hash=sha256:" in part for part in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:])
    for name in ("runtime.lock", "Dockerfile", "deploy/compose/compose.yaml"):
        assert not re.search(r"https?://(?!127\.0\.0\.1)", (REPOSITORY / name).read_text()), name


def test_the_final_stage_is_not_root_and_builds_nothing() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    final = text[text.rindex("\nFROM ") :]
    (user,) = re.findall(r"^USER (\S+)$", final, re.MULTILINE)
    assert user == "10001:10001"
    assert final.index("\nUSER ") > final.rindex("\nRUN ")
    assert not re.search(r"pip |uv |apt-get", final)
    assert "--require-hashes -r runtime.lock" in text


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/compose/compose.yaml"])
def test_images_have_versions(file: str) -> None:
    named = re.findall(r"(?:^ARG BASE_IMAGE=|^ *image: )(\S+)", (REPOSITORY / file).read_text(), re.MULTILINE)
    assert named
    for image in named:
        tag = image.rstrip("}").rpartition(":")[2]
        assert re.search(r"\d+\.\d+", tag), f"{image}: expected a tag with a version"


def test_only_the_proxy_is_published_and_on_loopback() -> None:
    assert [name for name, service in SERVICES.items() if service.get("ports")] == ["proxy"]
    assert SERVICES["proxy"]["ports"] == ["${UI_ADDRESS:-127.0.0.1:8080}:8080"]
    assert not [name for name, service in SERVICES.items() if "network_mode" in service]
    networks = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["networks"]
    assert {name for name, network in networks.items() if network.get("internal")} == {"database", "ui"}
    assert [name for name, service in SERVICES.items() if "outside" in service["networks"]] == ["code"]
    assert not set(SERVICES["proxy"]["networks"]) & set(SERVICES["postgres"]["networks"])


def test_the_code_server_listens_on_no_port() -> None:
    command = SERVICES["code"]["command"]
    socket = command[command.index("-s") + 1]
    assert not {"-p", "--port", "-h", "--host"} & set(command)
    (location,) = yaml.safe_load((COMPOSE / "workspace.yaml").read_text())["load_from"]
    assert location["grpc_server"] == {"socket": socket, "location_name": "batch_assets"}
    for name in OURS:
        assert "sockets:/run/batch-assets" in SERVICES[name]["volumes"]


def test_our_containers_are_confined() -> None:
    for name in (*OURS, "proxy"):
        service = SERVICES[name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not any("docker.sock" in volume for volume in service["volumes"]), name
    for name, service in SERVICES.items():
        assert service["restart"] == "unless-stopped" and service["healthcheck"]["test"], name


def test_store_and_keys_are_for_the_code_server_only() -> None:
    for name, service in SERVICES.items():
        mounted = any(volume.startswith("store:") for volume in service.get("volumes", ()))
        assert (mounted, "env_file" in service) == (name == "code", name == "code"), name
    assert "BATCH_ASSETS_WEBSERVER_TOKEN" not in SERVICES["code"]["environment"]


def test_secrets_have_no_default_and_every_variable_is_documented() -> None:
    found = {name: (how, value) for name, how, value in VARIABLE.findall((COMPOSE / "compose.yaml").read_text()) if how}
    secret = {name for name in found if re.search("PASSWORD|SECRET|TOKEN|KEY", name)}
    assert secret == {"POSTGRES_PASSWORD", "BATCH_ASSETS_ENGINE_SECRET", "BATCH_ASSETS_WEBSERVER_TOKEN"}
    assert {found[name] for name in secret} == {("?", "run ./make-secrets")}
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| (.+?) \|", DEPLOYMENT.read_text(), re.MULTILINE))
    assert set(table) == set(found)
    for name in set(found) - secret:
        assert table[name] == f"`{found[name][1]}`", name


def test_dagster_has_the_settings_of_one_machine_and_postgres() -> None:
    one_machine = yaml.safe_load((REPOSITORY / "deploy" / "local" / "dagster.yaml").read_text())
    with_postgres = yaml.safe_load((COMPOSE / "dagster.yaml").read_text())
    storage = with_postgres.pop("storage")["postgres"]["postgres_db"]
    assert with_postgres == one_machine
    assert storage["password"] == {"env": "DAGSTER_PG_PASSWORD"}
    on_a_cluster = yaml.safe_load((COMPOSE.parent / "kubernetes" / "dagster.yaml").read_text())
    assert storage["params"] == on_a_cluster["storage"]["postgres"]["postgres_db"]["params"]


def test_secrets_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    script = tmp_path / "make-secrets"
    script.write_bytes((COMPOSE / "make-secrets").read_bytes())
    said = subprocess.run(["sh", str(script), "anna"], capture_output=True, text=True, check=True).stdout
    password = re.findall(r"log in as anna with the password (\w+)", said)[0]
    assert {name: oct((tmp_path / name).stat().st_mode & 0o777) for name in (".env", "fleet.env", "htpasswd")} == {
        ".env": "0o600",
        "fleet.env": "0o600",
        "htpasswd": "0o644",
    }
    user, _, hashed = (tmp_path / "htpasswd").read_text().strip().partition(":")
    salt = hashed.split("$")[2]
    again = subprocess.run(
        ["openssl", "passwd", "-6", "-salt", salt, "-stdin"], input=password, capture_output=True, text=True, check=True
    )
    assert (user, hashed) == ("anna", again.stdout.strip())
    secrets = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    assert all(len(value) >= 48 and value.isalnum() for value in secrets.values()) and len(set(secrets.values())) == 3
    before = (tmp_path / ".env").read_text()
    assert subprocess.run(["sh", str(script)], capture_output=True, text=True, check=True).stdout == ""
    assert (tmp_path / ".env").read_text() == before


def test_secrets_are_in_no_commit_and_in_no_image() -> None:
    ignored = (REPOSITORY / ".gitignore").read_text().split()
    assert {"deploy/compose/.env", "deploy/compose/fleet.env", "deploy/compose/htpasswd"} <= set(ignored)
    sent = (REPOSITORY / ".dockerignore").read_text().split()
    assert "*" in sent and "!deploy/compose" not in sent and "!deploy" not in sent
