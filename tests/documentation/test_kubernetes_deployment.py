"""deploy/kubernetes, read as files: names agree, rights are those that are asked for, no secret is inside."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster._config import process_config, resolve_to_config_type
from support.documents import REPOSITORY

from batch_assets.kubernetes.rights import RIGHTS, Account
from batch_assets.kubernetes.run_workers import read_worker_sizes
from resources.fleet.fleet_config import FleetConfig

DEPLOY = REPOSITORY / "deploy" / "kubernetes"
Object = dict[str, Any]


def read(name: str) -> list[Object]:
    """The documents of a file, by libyaml: the parser in Python takes seven times as long."""
    return list(yaml.load_all((DEPLOY / name).read_text(), yaml.CSafeLoader))


(KUSTOMIZATION,) = read("kustomization.yaml")
OBJECTS: list[Object] = [one for name in KUSTOMIZATION["resources"] for one in read(name)]
(DAGSTER,) = read("dagster.yaml")
(VALUES,) = read("values.yaml")
LAUNCHER: Object = DAGSTER["run_launcher"]["config"]
PLATFORM, ENGINES = "batch-assets", "batch-assets-engines"
SECRETS = {"database", "engines", "ui", "ui-users", "store-keys"}
WORKLOADS = [one for one in OBJECTS if one["kind"] in ("Deployment", "StatefulSet")]


def of_kind(kind: str) -> list[Object]:
    return [one for one in OBJECTS if one["kind"] == kind]


def name_of(one: Object) -> str:
    return str(one["metadata"]["name"])


def workload(name: str) -> Object:
    (found,) = (one for one in WORKLOADS if name_of(one) == name)
    return found


def pod_of(one: Object) -> Object:
    spec: Object = one["spec"]["template"]["spec"]
    return spec


def containers(one: Object) -> list[Object]:
    pod = pod_of(one)
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_every_file_of_the_folder_is_used_or_said_to_be_for_something_else() -> None:
    generated = {
        source.partition("=")[2] or source
        for one in KUSTOMIZATION["configMapGenerator"]
        for source in (*one.get("envs", ()), *one.get("files", ()))
    }
    known = {*KUSTOMIZATION["resources"], *generated, "kustomization.yaml", "values.yaml", "make-secrets", "README.md"}
    known.add("cloud-identity.yaml")
    assert {path.name for path in DEPLOY.iterdir()} == known


def test_every_object_names_its_namespace_and_no_name_is_there_twice() -> None:
    whole = {"Namespace", "ClusterRole", "ClusterRoleBinding"}
    assert {name_of(one) for one in of_kind("Namespace")} == {PLATFORM, ENGINES}
    for one in OBJECTS:
        if one["kind"] not in whole:
            assert one["metadata"]["namespace"] in (PLATFORM, ENGINES), (one["kind"], name_of(one))
    keys = [(one["kind"], one["metadata"].get("namespace"), name_of(one)) for one in OBJECTS]
    assert len(keys) == len(set(keys))


def test_namespaces_enforce_the_restricted_standard_and_every_pod_meets_it() -> None:
    for one in of_kind("Namespace"):
        assert one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for one in WORKLOADS:
        pod = pod_of(one)
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False, name_of(one)
        for container in containers(one):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            assert container["resources"]["requests"]["cpu"] and container["resources"]["limits"]["memory"]


def test_run_workers_meet_it_too() -> None:
    raw = LAUNCHER["run_k8s_config"]
    pod = raw["pod_spec_config"]
    assert pod["enable_service_links"] is False and pod["termination_grace_period_seconds"] >= 30
    assert pod["security_context"]["run_as_user"] == 10001 and pod["security_context"]["run_as_non_root"]
    security = raw["container_config"]["security_context"]
    assert security["capabilities"] == {"drop": ["ALL"]} and security["allow_privilege_escalation"] is False
    assert raw["job_spec_config"]["backoff_limit"] == 0


def used(pod: Object) -> Iterator[tuple[str, str]]:
    """ConfigMaps and Secrets that a pod names."""
    for volume in pod.get("volumes", ()):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
    for container in pod["containers"]:
        for source in container.get("envFrom", ()):
            ((kind, reference),) = source.items()
            yield ("Secret" if kind == "secretRef" else "ConfigMap"), reference["name"]
        for variable in container.get("env", ()):
            if "valueFrom" in variable:
                yield "Secret", variable["valueFrom"]["secretKeyRef"]["name"]


def test_every_name_that_is_used_is_made_somewhere() -> None:
    maps = {one["name"] for one in KUSTOMIZATION["configMapGenerator"]}
    accounts = {name_of(one) for one in of_kind("ServiceAccount")}
    found = {pair for one in WORKLOADS for pair in used(pod_of(one))}
    found |= {("ConfigMap", name) for name in LAUNCHER["env_config_maps"]}
    found |= {("Secret", name) for name in LAUNCHER["env_secrets"]}
    found |= {("ConfigMap", one["configMap"]["name"]) for one in LAUNCHER["volumes"] if "configMap" in one}
    assert {name for kind, name in found if kind == "ConfigMap"} <= maps
    assert {name for kind, name in found if kind == "Secret"} == SECRETS
    assert LAUNCHER["instance_config_map"] in maps and LAUNCHER["service_account_name"] in accounts
    for one in WORKLOADS:
        assert pod_of(one).get("serviceAccountName", "") in {*accounts, ""}
        mounted = {mount["name"] for container in containers(one) for mount in container["volumeMounts"]}
        claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        assert mounted == {volume["name"] for volume in pod_of(one)["volumes"]} | claims, name_of(one)
    assert {one["name"] for one in LAUNCHER["volumes"]} == {one["name"] for one in LAUNCHER["volume_mounts"]}


def test_services_find_their_pods_and_ports() -> None:
    for service in of_kind("Service"):
        selector = service["spec"]["selector"]
        (found,) = (one for one in WORKLOADS if one["spec"]["template"]["metadata"]["labels"] == selector)
        named = {port["name"]: port["containerPort"] for port in pod_of(found)["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(named)
        assert service["spec"].get("type", "ClusterIP") == "ClusterIP"
    (location,) = yaml.safe_load((DEPLOY / "workspace.yaml").read_text())["load_from"]
    assert location["grpc_server"] == {"host": "code-location", "port": 4000, "location_name": "batch_assets"}
    assert {"--location-name", "batch_assets", "4000"} <= set(
        pod_of(workload("code-location"))["containers"][0]["args"]
    )
    template = (DEPLOY / "proxy.conf.template").read_text()
    assert "proxy_pass http://webserver.batch-assets.svc.cluster.local:3000;" in template
    assert template.count("auth_basic_user_file /etc/nginx/users/htpasswd;") == 1


ROLES = {"daemon": Account.DAEMON, "webserver": Account.WEBSERVER, "worker": Account.WORKER}


@pytest.mark.parametrize("name", ROLES)
def test_a_role_grants_what_the_self_test_asks_for_and_no_more(name: str) -> None:
    (role,) = (one for one in of_kind("Role") if name_of(one) == name)
    granted = {
        (verb, group, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    asked = {(right.verb.verb, right.verb.group, right.verb.name) for right in RIGHTS[ROLES[name]]}
    assert granted == {one for one in asked if one[2] != "nodes"}  # these are the ClusterRole's
    assert role["metadata"]["namespace"] == (ENGINES if name == "worker" else PLATFORM)


def test_the_one_right_on_the_cluster_is_to_read_nodes() -> None:
    (role,) = of_kind("ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    (binding,) = of_kind("ClusterRoleBinding")
    assert [one["name"] for one in binding["subjects"]] == ["daemon", "run-worker", "code-location"]
    bound = {name_of(one): {subject["name"] for subject in one["subjects"]} for one in of_kind("RoleBinding")}
    assert bound == {"daemon": {"daemon"}, "webserver": {"webserver"}, "worker": {"run-worker", "code-location"}}


def test_a_pod_starts_only_when_its_account_has_its_rights() -> None:
    for name, account, namespace in (
        ("daemon", "daemon", PLATFORM),
        ("webserver", "webserver", PLATFORM),
        ("code-location", "worker", ENGINES),
    ):
        pod = pod_of(workload(name))
        (check,) = pod["initContainers"]
        assert check["args"] == ["kubernetes", "check", account, "--namespace", namespace]
        assert pod["serviceAccountName"] == name
    for name in ("postgres", "proxy"):
        assert pod_of(workload(name))["automountServiceAccountToken"] is False


def test_what_answers_is_probed_and_what_there_is_one_of_is_replaced() -> None:
    for one in WORKLOADS:
        main = pod_of(one)["containers"][0]
        assert "livenessProbe" in main, name_of(one)
        assert name_of(one) == "daemon" or "readinessProbe" in main, name_of(one)
    assert workload("daemon")["spec"]["strategy"] == {"type": "Recreate"}
    assert {name_of(one): one["spec"]["replicas"] for one in WORKLOADS} == {
        "postgres": 1,
        "code-location": 1,
        "daemon": 1,
        "webserver": 2,
        "proxy": 2,
    }
    for budget in of_kind("PodDisruptionBudget"):
        assert workload(name_of(budget))["spec"]["selector"] == budget["spec"]["selector"]


def test_network_policies_begin_with_nothing_and_name_pods_that_there_are() -> None:
    policies = {name_of(one): one["spec"] for one in of_kind("NetworkPolicy")}
    assert policies["nothing-else"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    components = {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in WORKLOADS} | {"run_worker"}
    named = re.findall(
        r"component(?:: |, operator: In, values: \[)([a-z_, -]+)", (DEPLOY / "network-policies.yaml").read_text()
    )
    assert {name for found in named for name in found.split(", ")} == components
    code = policies["code-location"]["ingress"]
    assert code[0]["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["webserver", "daemon"]


def test_a_clouds_identity_is_reached_by_webserver_and_daemon_once_it_is_asked_for() -> None:
    policy = yaml.safe_load((DEPLOY / "cloud-identity.yaml").read_text())
    assert policy["metadata"]["namespace"] == "batch-assets"
    (selected,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert selected["values"] == ["webserver", "daemon"] and policy["spec"]["policyTypes"] == ["Egress"]
    reached = {
        (ipaddress.ip_network(peer["ipBlock"]["cidr"]), port["port"])
        for rule in policy["spec"]["egress"]
        for peer in rule["to"]
        for port in rule["ports"]
    }
    assert {(str(network[0]), port) for network, port in reached} >= {("169.254.169.254", 80), ("169.254.170.23", 80)}
    assert all(network.num_addresses == 1 and network.is_private for network, _ in reached)
    assert "cloud-identity.yaml" in (DEPLOY / "README.md").read_text()


def test_images_have_versions_and_run_workers_have_the_code_locations() -> None:
    tags = {one["name"]: one["newTag"] for one in KUSTOMIZATION["images"]}
    for one in WORKLOADS:
        for container in containers(one):
            assert re.search(r"\d+\.\d+", tags[container["image"]]), container["image"]
    (replacement,) = KUSTOMIZATION["replacements"]
    assert replacement["source"]["name"] == "code-location"
    assert "DAGSTER_CURRENT_IMAGE" in replacement["targets"][0]["fieldPaths"][0]


def test_dagster_has_the_settings_of_one_machine_and_what_a_cluster_needs() -> None:
    one_machine: Object = yaml.safe_load((REPOSITORY / "deploy" / "local" / "dagster.yaml").read_text())
    own = {key: value for key, value in DAGSTER.items() if key not in ("storage", "compute_logs", "run_launcher")}
    monitoring, expected = own.pop("run_monitoring"), one_machine.pop("run_monitoring")
    assert own == one_machine
    assert monitoring["max_resume_run_attempts"] == 0 and monitoring["max_runtime_seconds"] > 0
    assert monitoring.keys() - {"cancel_timeout_seconds", "max_runtime_seconds"} == expected.keys()
    assert DAGSTER["run_retries"] == {"enabled": True, "max_retries": 2, "retry_on_asset_or_op_failure": False}
    assert DAGSTER["storage"]["postgres"]["postgres_db"]["password"] == {"env": "DAGSTER_PG_PASSWORD"}


@pytest.mark.parametrize("config", [LAUNCHER, VALUES["runLauncher"]["config"]["customRunLauncher"]["config"]])
def test_dagster_takes_the_run_launchers_configuration(config: Object) -> None:
    from batch_assets.kubernetes.run_launcher import FencedK8sRunLauncher

    result = process_config(resolve_to_config_type(FencedK8sRunLauncher.config_type()), config)
    assert result.success, result.errors


def test_the_charts_values_say_the_same() -> None:
    custom = VALUES["runLauncher"]["config"]["customRunLauncher"]
    assert VALUES["runLauncher"]["type"] == "CustomRunLauncher"
    assert {key: custom[key] for key in ("module", "class")} == {
        key: DAGSTER["run_launcher"][key] for key in ("module", "class")
    }
    for section in ("run_monitoring", "run_retries", "concurrency", "retention"):
        assert VALUES["additionalInstanceConfig"][section] == DAGSTER[section], section
    daemon = VALUES["dagsterDaemon"]
    coordinator = daemon["runCoordinator"]
    assert coordinator["type"] == "CustomRunCoordinator"
    assert coordinator["config"]["customRunCoordinator"] == DAGSTER["run_coordinator"]
    assert not daemon["runRetries"]["enabled"] and not daemon["runMonitoring"]["enabled"]
    assert VALUES["postgresql"]["postgresqlParams"] == DAGSTER["storage"]["postgres"]["postgres_db"]["params"]
    assert VALUES["postgresql"]["enabled"] is False and VALUES["rbacEnabled"] is False
    assert VALUES["dagsterWebserver"]["replicaCount"] == workload("webserver")["spec"]["replicas"]
    (deployment,) = VALUES["dagster-user-deployments"]["deployments"]
    # Or its settings override the launcher's; and a deployment has no account of its own.
    assert not deployment["includeConfigInLaunchedRuns"]["enabled"] and "serviceAccount" not in deployment
    subchart = VALUES["dagster-user-deployments"]
    assert subchart["serviceAccount"] == {"create": False, "name": "code-location"}
    assert subchart["rbacEnabled"] is False and "serviceAccountName" not in VALUES["global"]
    # The proxy asks the Service `webserver`; policies and budgets select by these labels.
    (service,) = (one for one in of_kind("Service") if name_of(one) == "webserver")
    selected = {"app.kubernetes.io/name": VALUES["nameOverride"], **VALUES["dagsterWebserver"]["labels"]}
    assert service["spec"]["selector"] == selected
    assert VALUES["dagsterWebserver"]["service"]["port"] == service["spec"]["ports"][0]["port"]


def test_fleet_and_sizes_are_what_the_platform_reads(tmp_path: Path) -> None:
    fleet = FleetConfig.load(DEPLOY / "fleet.yaml")
    (cluster,) = fleet.kubernetes
    assert (cluster.namespace, cluster.kubeconfig) == (ENGINES, None)
    assert read_worker_sizes(DEPLOY / "run-workers.yaml").tags(1)


def test_no_secret_is_in_any_file() -> None:
    assert not of_kind("Secret")
    for path in DEPLOY.iterdir():
        text = path.read_text()
        assert not re.search(r"(?i)(password|secret|token|key)[a-z_]*: *\"?[A-Za-z0-9+/=]{20,}", text), path.name


def test_secrets_are_made_for_those_who_use_them() -> None:
    def made() -> tuple[dict[str, Object], str]:
        done = subprocess.run([str(DEPLOY / "make-secrets"), "anna"], capture_output=True, text=True, check=True)
        return {name_of(one): one["stringData"] for one in yaml.safe_load_all(done.stdout)}, done.stderr

    first, said = made()
    second, _ = made()
    assert set(first) == SECRETS - {"store-keys"}
    assert first["database"]["DAGSTER_PG_PASSWORD"] in first["database"]["BATCH_ASSETS_FLEET_DB"]
    user, _, hashed = first["ui-users"]["htpasswd"].partition(":")
    password = re.findall(r"log in as anna with the password (\w+)", said)[0]
    again = subprocess.run(
        ["openssl", "passwd", "-6", "-salt", hashed.split("$")[2], "-stdin"],
        input=password,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (user, hashed) == ("anna", again.stdout.strip())
    assert all(first[name] != second[name] for name in first)
    assert len(first["engines"]["BATCH_ASSETS_ENGINE_SECRET"]) == len(first["ui"]["BATCH_ASSETS_WEBSERVER_TOKEN"]) == 64
