"""What a VM does when it starts, as cloud-config (cloud-init). Pure: the same order gives the same bytes.

- The SSH host key is ours, so that it can be pinned. One user may log in, with one key, to reach the engine's port.
- The engine is a container under systemd, bound to loopback, with its API key in a file of root (0600). When it ends
  four times within ten minutes, the VM powers off.
- A login runs one command, whatever is asked for: it prints what EC2's metadata service says of the machine's risk. The
  service answers the VM only, so nobody else can ask it.
- A timer powers the VM off when nobody held a tunnel for `orphan_seconds`. EC2 ends a VM that powers itself off, as it
  was started with InstanceInitiatedShutdownBehavior=terminate: the dead-man's switch needs no credentials.

Whoever may read a VM's user data (`ec2:DescribeInstanceAttribute`, or any process of the VM itself) has its keys, and
no other VM's. The container cannot: metadata version 2 with a hop limit of 1 does not reach beyond the VM's own network
(`launch`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.cloud.engine_container import ENGINE_PORT
from gpu_runner.providers.ec2.ssh_keys import SshKeys

USER = "batch-assets"
LARGEST = 16_384  # bytes that EC2 takes, before base64
WATCH_SECONDS = 30

_FOLDER = "/etc/batch-assets"
_WATCH = "/usr/local/sbin/batch-assets-watch"
_RISK = "/usr/local/sbin/batch-assets-risk"


@dataclass(frozen=True, slots=True)
class Boot:
    """What the VM is to run. `words`: the container's command line, behind `entry` where that
    takes the place of the image's own. `environment` is kept in a file of root."""

    image: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    keys: SshKeys
    orphan_seconds: float
    entry: tuple[str, ...] = ()


def user_data(boot: Boot) -> str:
    """The document. Raises ProviderError when it is larger than EC2 takes, or a value cannot be in it."""
    document = {
        "ssh_deletekeys": True,
        "ssh_genkeytypes": [],
        "ssh_keys": {"ed25519_private": boot.keys.host.private, "ed25519_public": boot.keys.host.public},
        "ssh_pwauth": False,
        "disable_root": True,
        "users": [
            {
                "name": USER,
                "system": True,
                "shell": "/bin/sh",  # for the one command that its key may run
                "lock_passwd": True,
                "ssh_authorized_keys": [_authorized(boot.keys.client.public)],
            }
        ],
        "write_files": [
            _file(f"{_FOLDER}/engine.env", environment_file(boot.environment), "0600"),
            _file("/etc/ssh/sshd_config.d/10-batch-assets.conf", _SSHD, "0600"),
            _file(_WATCH, watch_script(boot.orphan_seconds), "0755"),
            _file(_RISK, RISK_SCRIPT, "0755"),
            _file("/etc/systemd/system/batch-assets-engine.service", _engine_unit(boot), "0644"),
            _file("/etc/systemd/system/batch-assets-watch.service", _WATCH_UNIT, "0644"),
            _file("/etc/systemd/system/batch-assets-watch.timer", _WATCH_TIMER, "0644"),
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", "--now", "batch-assets-watch.timer"],
            ["systemctl", "try-restart", "ssh.service", "sshd.service"],
            ["systemctl", "enable", "--now", "--no-block", "batch-assets-engine.service"],
        ],
    }
    text = "#cloud-config\n" + json.dumps(document, indent=1, ensure_ascii=True) + "\n"  # JSON is YAML
    if len(text) > LARGEST:
        raise ProviderError(
            f"user data: expected at most {LARGEST:,} bytes, found {len(text):,}: shorten `environment`"
        )
    return text


def environment_file(environment: Mapping[str, str]) -> str:
    """As `docker run --env-file` reads it: a line each, taken as it is. Raises ProviderError for a line break."""
    for name, value in environment.items():
        if not value.isprintable():
            raise ProviderError(f"environment: expected printable characters on one line in {name}")
    return "".join(f"{name}={value}\n" for name, value in sorted(environment.items()))


def watch_script(orphan_seconds: float) -> str:
    """Powers the VM off when no process of the tunnels' user was there for so long: sshd has one per connection.

    Seconds are those since boot, so a clock that is set changes nothing. sshd gives up dead connections by itself.
    """
    return f"""#!/bin/sh
set -eu
seen="${{WATCH_STATE:-/run/batch-assets-seen}}"
read -r up _ < "${{WATCH_UPTIME:-/proc/uptime}}"
up="${{up%%.*}}"
if [ ! -e "$seen" ] || pgrep -u {USER} > /dev/null; then
    echo "$up" > "$seen.new"
    mv "$seen.new" "$seen"
fi
read -r last < "$seen"
if [ "$((up - last))" -ge {max(1, round(orphan_seconds))} ]; then
    exec shutdown -h now "no fleet held a tunnel to this machine"
fi
"""


def unit_words(words: Sequence[str]) -> str:
    """A command line as systemd reads it: quoted, without its specifiers and variables (systemd.service(5))."""
    return " ".join(
        '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") + '"'
        for word in words
    )


def _authorized(public: str) -> str:
    return f'restrict,port-forwarding,permitopen="127.0.0.1:{ENGINE_PORT}",command="{_RISK}" {public}'


def _file(path: str, content: str, mode: str) -> dict[str, str]:
    return {"path": path, "content": content, "permissions": mode, "owner": "root:root"}


def _engine_unit(boot: Boot) -> str:
    published = f"127.0.0.1:{ENGINE_PORT}:{ENGINE_PORT}"
    run = ["/usr/bin/docker", "run", "--rm", "--name", "batch-assets-engine", "--gpus", "all", "--shm-size", "16g"]
    run += ["--security-opt", "no-new-privileges", "--publish", published, "--env-file", f"{_FOLDER}/engine.env"]
    run += ["--entrypoint", boot.entry[0]] if boot.entry else []
    run += [boot.image, *boot.entry[1:], *boot.words]
    if any("\n" in word or "\r" in word for word in run):
        raise ProviderError(f"the engine's command line: expected no line break, found {shlex.join(boot.words)!r:.200}")
    return f"""[Unit]
Description=inference engine of batch-assets
After=docker.service network-online.target
Wants=docker.service network-online.target
StartLimitIntervalSec=600
StartLimitBurst=4
StartLimitAction=poweroff

[Service]
ExecStartPre=-/usr/bin/docker rm --force batch-assets-engine
ExecStart={unit_words(run)}
ExecStop=/usr/bin/docker stop --time 10 batch-assets-engine
Restart=always
RestartSec=5
TimeoutStartSec=infinity

[Install]
WantedBy=multi-user.target
"""


# Version 2 of the metadata service: a token first. 404, of which curl prints nothing: there is no recommendation.
RISK_SCRIPT = """#!/bin/sh
service="${METADATA_SERVICE:-http://169.254.169.254}"
ttl="X-aws-ec2-metadata-token-ttl-seconds: 60"
token=$(curl -sf -m 1 --noproxy '*' -X PUT -H "$ttl" "$service/latest/api/token") || exit 1
curl -sf -m 1 --noproxy '*' --max-filesize 4096 -H "X-aws-ec2-metadata-token: $token" \\
    "$service/latest/meta-data/events/recommendations/rebalance" || exit 0
"""

_SSHD = f"""AllowUsers {USER}
PasswordAuthentication no
HostKey /etc/ssh/ssh_host_ed25519_key
ClientAliveInterval 15
ClientAliveCountMax 4
AllowAgentForwarding no
X11Forwarding no
"""

_WATCH_UNIT = f"""[Unit]
Description=ends this machine when no fleet of batch-assets looks after it
ConditionPathExists={_WATCH}

[Service]
Type=oneshot
ExecStart={_WATCH}
"""

_WATCH_TIMER = f"""[Unit]
Description=looks every {WATCH_SECONDS} s whether a fleet of batch-assets is there

[Timer]
OnBootSec={WATCH_SECONDS}
OnUnitActiveSec={WATCH_SECONDS}
AccuracySec=1

[Install]
WantedBy=timers.target
"""
