"""A real Kubernetes for tests: started by the tool `kube-cluster` where that is there, with the engine's image on it.

The provider works with an account of its own that has the rights of docs/providers.md and no other; the test itself is
administrator. The namespace enforces the Pod Security Standard "restricted".
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.kubernetes.provider import KubernetesProvider
from support.documents import REPOSITORY
from support.engine_image import IMAGE, engine_command, write_engine_image
from support.timing import PATIENCE

TOOL = Path(os.environ.get("KUBE_CLUSTER") or REPOSITORY.parent / "shared" / "tools" / "kube-cluster")
# containerd makes the root folder of a container under its own umask. Under 0o077, which our command line sets for the
# process that it runs in, only root could start a program in it, and every pod of another user ends with StartError.
CONTAINERS_UMASK = 0o022
LOCK = Path("/tmp/kube-cluster.lock")
NAMESPACE = "engines"
OFFER: dict[str, Any] = {
    "name": "h100",
    "gpu": "H100",
    "gpu_memory_gib": 80,
    "price_per_hour": 3.6,
    "boot_seconds": 5,
    "cpu": "50m",
    "memory": "256Mi",
    "node_selector": {"pool": "on-demand"},
}
ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "Role",
    "metadata": {"name": "fleet", "namespace": NAMESPACE},
    "rules": [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "watch", "delete"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["create"]},
    ],
}


class RealCluster:
    """The cluster, as its administrator sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubectl = folder / "bin" / "kubectl"
        self.admin = folder / "kubeconfig"

    def tool(self, *words: str) -> None:
        """A verb of kube-cluster on this cluster: `tool("stop", "apiserver")`."""
        verb, *rest = words
        command = [TOOL, verb, self.folder, *rest]
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=120 * PATIENCE, umask=CONTAINERS_UMASK
        )

    def containerd_errors(self) -> str:
        """The last of what the containerd of each node says of what it could not do."""
        found = []
        for log in sorted((self.folder / "logs").glob("containerd*.log")):
            lines = [line for line in log.read_text(errors="replace").splitlines() if "level=error" in line]
            found += [f"{log.name}: {line[:1000]}" for line in lines[-20:]]
        return "\n".join(found)

    def run(self, *words: str, given: object = None, check: bool = True, namespace: str = NAMESPACE) -> str:
        """kubectl in the namespace of the engines; `given` is its standard input, as JSON."""
        command = [self.kubectl, "--kubeconfig", self.admin, "--namespace", namespace, *words]
        text = None if given is None else json.dumps(given)
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60 * PATIENCE)
        assert not check or done.returncode == 0, f"kubectl {words}: {done.stderr}"
        return done.stdout

    def apply(self, *objects: object) -> None:
        """Make or change objects."""
        for one in objects:
            self.run("apply", "-f", "-", given=one)

    def allows(self, verb: str, resource: str) -> bool:
        """Whether the API server would let the fleet's account do this, by a SubjectAccessReview."""
        account = f"system:serviceaccount:{NAMESPACE}:fleet"
        return self.run("auth", "can-i", verb, resource, f"--as={account}", check=False).strip() == "yes"

    def claim(self, name: str, namespace: str = NAMESPACE) -> Path:
        """A PersistentVolumeClaim that every node can mount; returns where it lies on this computer."""
        spec = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "standard",
            "resources": {"requests": {"storage": "1Gi"}},
        }
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        self.run("apply", "-f", "-", given=claim, namespace=namespace)
        deadline = time.monotonic() + 60 * PATIENCE
        while not (volume := self.run("get", "pvc", name, "-o", "jsonpath={.spec.volumeName}", namespace=namespace)):
            assert time.monotonic() < deadline, f"the claim {name} gets no volume"
            time.sleep(0.2)
        return Path(self.run("get", "pv", volume, "-o", "jsonpath={.spec.hostPath.path}"))

    def show_nodes(self, account: str) -> None:
        """Lets a service account read nodes, which is a right of the whole cluster."""
        group = "rbac.authorization.k8s.io"
        rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}
        self.apply(
            {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": {"name": "nodes"}, "rules": [rule]},
            {
                "apiVersion": f"{group}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": f"nodes-{account}"},
                "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "nodes"},
            },
        )

    def account(self, name: str, file: Path) -> Path:
        """A kubeconfig of a service account."""
        admin = yaml.safe_load(self.admin.read_text())
        token = self.run("create", "token", name, "--duration", "1h").strip()
        admin["users"] = [{"name": "account", "user": {"token": token}}]
        for one in admin["contexts"]:
            one["context"]["user"] = "account"
        file.write_text(json.dumps(admin))
        return file

    def prepare(self) -> None:
        """Namespace and account."""
        enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
        subject = {"kind": "ServiceAccount", "name": "fleet", "namespace": NAMESPACE}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "fleet"}
        self.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": enforced}},
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "fleet", "namespace": NAMESPACE}},
            ROLE,
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": {"name": "fleet", "namespace": NAMESPACE},
                "subjects": [subject],
                "roleRef": role,
            },
        )


@contextlib.contextmanager
def real_cluster() -> Iterator[RealCluster]:
    """A cluster with the namespace of the engines. Skips with a reason where that cannot be."""
    if running := os.environ.get("KUBE_CLUSTER_DIR"):  # one that is there, for whoever works on these tests
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            cluster = RealCluster(Path(running))
            cluster.prepare()
            yield cluster
        return
    with bare_cluster() as cluster:
        cluster.prepare()
        yield cluster


@contextlib.contextmanager
def bare_cluster(*images: Path) -> Iterator[RealCluster]:
    """Start one, one on a machine at a time, with the engine's image and these; take it down at the end."""
    if not TOOL.exists():
        pytest.skip(f"no cluster: {TOOL.name} is not beside this repository (KUBE_CLUSTER names it)")
    with tempfile.TemporaryDirectory(prefix="kube-", dir="/tmp") as below, LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = RealCluster(Path(below) / "cluster")
        command = [TOOL, "up", cluster.folder]
        try:
            started = subprocess.run(
                command, capture_output=True, text=True, timeout=180 * PATIENCE, umask=CONTAINERS_UMASK
            )
            if started.returncode and (lacking := re.search(r"(not found|Needs|needs|install|root).*", started.stderr)):
                pytest.skip(f"no cluster: {lacking[0]}")
            assert started.returncode == 0, started.stderr
            engine = Path(below) / "engine.tar"
            write_engine_image(engine)
            cluster.tool("load", str(engine), *map(str, images))
            yield cluster
        finally:
            print(cluster.containerd_errors())  # shown when a test fails
            subprocess.run([TOOL, "down", cluster.folder], capture_output=True, timeout=120 * PATIENCE)


def cluster_provider(home: Path, kubeconfig: Path, **settings: Any) -> KubernetesProvider:
    """The provider `pods` on it."""
    return KubernetesProvider(home, KubernetesProviderConfig.model_validate(provider_entry(kubeconfig, **settings)))


def provider_entry(kubeconfig: Path, **settings: Any) -> dict[str, Any]:
    """The provider `pods` as it stands in fleet.yaml."""
    return {
        "name": "pods",
        "namespace": NAMESPACE,
        "kubeconfig": str(kubeconfig),
        "reach": "pod_ip",
        "image": IMAGE,
        "command": engine_command(),
        "cache_size": "50Mi",
        "shared_memory": "16Mi",
        "notice_seconds": 4,
        "offers": [OFFER],
        **settings,
    }
