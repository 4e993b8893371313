"""What stands in fleet.yaml under `ssh`: an inventory of hosts, their GPUs, and how an engine is started there.

ssh:
  - name: lab
    known_hosts: known_hosts          # a file from the folder of fleet.yaml; or `host_keys` at each host
    user: batch
    key_file: ~/.ssh/id_ed25519       # or key_env: the environment variable that holds the private key
    command: [vllm, serve, "{model}", --host, 127.0.0.1, --port, "{port}"]
    hosts:
      - {name: a100-1, address: 10.0.0.5, gpu: A100, gpus: 8, gpus_per_instance: 2, gpu_memory_gib: 80,
         price_per_hour: 2.4}
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from gpu_runner.models.facts import Server
from gpu_runner.providers.sglang_server import SGLANG_ENTRY, SGLANG_WORDS

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
VLLM_COMMAND = ("vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}")
DOCKER_IMAGE = "{image}"

# vLLM's process listens inside the container; only loopback of the host is mapped to it. The key is passed by its name.
_DOCKER_RUN = ("docker", "run", "--rm", "--init", "--name", "{name}", "--gpus", '"device={gpus}"', "--ipc=host")
_DOCKER_REACH = ("-p", "127.0.0.1:{port}:8000", "-e", "VLLM_API_KEY", "-e", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
_DOCKER_ENGINE = ("--entrypoint", "vllm", DOCKER_IMAGE, "serve", "{model}", "--host", "0.0.0.0", "--port", "8000")
_SGLANG_COMMAND = (*SGLANG_ENTRY, *(word.replace("0.0.0.0", "127.0.0.1") for word in SGLANG_WORDS))
_DOCKER_SGLANG = (
    *("--entrypoint", SGLANG_ENTRY[0], DOCKER_IMAGE, *SGLANG_ENTRY[1:]),
    *(word.replace("{port}", "8000") for word in SGLANG_WORDS),
)
# `docker rm` fails for a container that is gone, in some versions, and for one that is being removed: the list decides.
_DOCKER_GONE = 'docker rm -f "$1"; left=$(docker ps -aq --filter "name=^/?$1$") && test -z "$left"'
DOCKER_END = ("sh", "-c", _DOCKER_GONE, "sh", "{name}")

_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # names a file of the host, too
_HOST_KEY = re.compile(r"(?:ssh-|ecdsa-sha2-|sk-)[A-Za-z0-9@.-]+ [A-Za-z0-9+/]+={0,2}(?: [^\n\r]*)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SshHostConfig(BaseModel):
    """One host. What is not said here is as its provider says."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(pattern=NAME, description="the host's name in offers and messages, one of its own for each")
    address: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}$", description="name or IP address")
    port: int = Field(default=22, ge=1, le=65535, description="of its SSH server")
    user: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}$", description="the user that logs in"
    )
    host_keys: tuple[str, ...] = Field(
        default=(), description="its public host keys, `ssh-ed25519 AAAA…`; without them `known_hosts` is asked"
    )
    gpu: str = Field(description="spelled as in `gpu_runner/offers/gpus.py`")
    gpus: int = Field(default=1, ge=1, le=64, description="GPUs of the host")
    gpus_per_instance: int = Field(
        default=1, ge=1, description="GPUs of one instance; the host has a slot for each set"
    )
    gpu_devices: tuple[str, ...] = Field(
        default=(), description="the GPUs as CUDA_VISIBLE_DEVICES names them; by default `0` to `gpus` - 1"
    )
    gpu_memory_gib: float = Field(gt=0, description="GiB per GPU")
    price_per_hour: float = Field(default=1.0, gt=0, description="what an hour of one instance costs you")
    boot_seconds: float = Field(default=120.0, ge=0, description="what ranking assumes of a start")

    @field_validator("host_keys")
    @classmethod
    def _are_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_HOST_KEY.fullmatch(key) for key in keys):
            raise ValueError("host_keys: expected public keys such as `ssh-ed25519 AAAA…`")
        return keys

    @model_validator(mode="after")
    def _sets_fit(self) -> SshHostConfig:
        if self.gpus % self.gpus_per_instance:
            raise ValueError(f"gpus_per_instance: expected a divisor of gpus, {self.gpus}")
        devices = self.gpu_devices
        if devices and (len(devices) != self.gpus or len(set(devices)) != len(devices)):
            raise ValueError(f"gpu_devices: expected {self.gpus} different devices, as gpus says")
        if not all(_DEVICE.fullmatch(device) for device in devices):
            raise ValueError("gpu_devices: expected numbers or UUIDs of GPUs")
        return self

    @property
    def gpu_sets(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each slot."""
        devices = self.gpu_devices or tuple(str(number) for number in range(self.gpus))
        step = self.gpus_per_instance
        return tuple(devices[at : at + step] for at in range(0, self.gpus, step))


class SshProviderConfig(BaseModel):
    """Hosts that are reached in the same way and start the same engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(default="ssh", pattern=NAME, description="the provider's name, one of its own for each")
    hosts: tuple[SshHostConfig, ...] = Field(min_length=1, max_length=200, description="the inventory")
    user: str = Field(
        default="root",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}$",
        description="the user that logs in, unless the host says",
    )
    key_file: Path | None = Field(default=None, description="file of the private key, from the folder of this one")
    key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="environment variable with the private key itself",
    )
    known_hosts: Path | None = Field(
        default=None, description="file of host keys as OpenSSH has it; only hosts whose key it holds are spoken to"
    )
    command: tuple[str, ...] = Field(
        default=(),
        description="`{model}`, `{port}`, `{gpus}` and `{name}` are filled in; flags of vLLM are added at its end; by "
        "default `vllm serve`, in a container if there is a `docker_image`",
    )
    end_command: tuple[str, ...] = Field(
        default=(),
        description="run after the engine's processes have ended, for what it started elsewhere, and again until it "
        "exits with 0: until then its GPUs stay taken. It has to exit with 0, too, when there is nothing left",
    )
    docker_image: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,255}$", description="engine image, by digest if you can"
    )
    sglang_command: tuple[str, ...] = Field(
        default=(),
        description="as `command`, for datasets with `engine.server: sglang`; by default SGLang's `launch_server`",
    )
    sglang_image: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,255}$", description="as `docker_image`, of SGLang"
    )
    docker_arguments: tuple[str, ...] = Field(
        default=(), description="further arguments of `docker run`, as for volumes"
    )
    environment: dict[str, str] = Field(default={}, description="further environment variables of the engine")
    folder: str = Field(
        default=".local/state/batch-assets",
        pattern=r"^[^\x00\n]{1,200}$",
        description="where machines are written down on a host, from the user's home on; all who share its GPUs need "
        "the same",
    )
    first_port: int = Field(
        default=18000, ge=1024, le=60000, description="engines listen on loopback ports of their host from here on"
    )
    orphan_seconds: int = Field(
        default=120, ge=5, description="without a sign of life of the fleet for so long, instances end themselves"
    )

    @field_validator("command", "sglang_command")
    @classmethod
    def _has_port(cls, command: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if command and not any("{port}" in word for word in command):
            raise ValueError(f"{info.field_name}: expected {{port}} in it, and {{model}} where it takes one")
        return command

    @field_validator("environment")
    @classmethod
    def _are_variables(cls, given: dict[str, str]) -> dict[str, str]:
        if not all(_VARIABLE.fullmatch(name) and "\0" not in value for name, value in given.items()):
            raise ValueError("environment: expected names of variables, and no NUL in their values")
        return given

    @model_validator(mode="after")
    def _is_whole(self) -> SshProviderConfig:
        if (self.key_file is None) == (self.key_env is None):
            raise ValueError("key_file: expected either key_file or key_env, the key to log in with")
        if self.command and self.docker_image:
            raise ValueError("docker_image: expected command or docker_image, not both")
        if self.sglang_command and self.sglang_image:
            raise ValueError("sglang_image: expected sglang_command or sglang_image, not both")
        names = [host.name for host in self.hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"hosts: expected a name of its own for each, found twice: {', '.join(twice)}")
        if self.known_hosts is None and (without := [host.name for host in self.hosts if not host.host_keys]):
            raise ValueError(f"known_hosts: expected it, or host_keys at each host; {', '.join(without)} has none")
        return self

    @property
    def engine_command(self) -> tuple[str, ...]:
        """The command template of an engine."""
        if self.docker_image is None:
            return self.command or VLLM_COMMAND
        return self._container(self.docker_image, _DOCKER_ENGINE)

    @property
    def engine_end_command(self) -> tuple[str, ...]:
        """What is run when an engine has ended; empty: nothing."""
        return self.end_command or (DOCKER_END if self.docker_image else ())

    def commands(self, server: Server) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The command template of an engine, empty where there is none for this server, and what is run at its end."""
        if server == "vllm":
            return self.engine_command, self.engine_end_command
        if self.sglang_image is not None:
            return self._container(self.sglang_image, _DOCKER_SGLANG), self.end_command or DOCKER_END
        started = self.sglang_command or (_SGLANG_COMMAND if self.docker_image is None else ())
        return started, self.end_command

    def _container(self, image: str, engine: tuple[str, ...]) -> tuple[str, ...]:
        passed = [word for name in sorted(self.environment) for word in ("-e", name)]
        words = tuple(image if word == DOCKER_IMAGE else word for word in engine)
        return (*_DOCKER_RUN, *_DOCKER_REACH, *passed, *self.docker_arguments, *words)

    def below(self, folder: Path) -> SshProviderConfig:
        """The same with its files from `folder` on."""
        paths = {name: getattr(self, name) for name in ("key_file", "known_hosts")}
        found = {name: folder.resolve() / path.expanduser() for name, path in paths.items() if path is not None}
        return self.model_copy(update=found)
