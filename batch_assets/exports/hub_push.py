"""A finished export to a dataset repository of the Hugging Face hub: one commit, so that no reader sees half of it.

Files lie in `data/`; the card is README.md. A file that the hub has with the same checksum is not sent again, neither
one of the former commit nor one that a killed push sent. Memory does not grow with the files: one after the other is
read from the disk. Sent is by Git LFS over HTTP, whose objects are known by their SHA-256, not by the hub's Xet.

Protocol: https://huggingface.co/docs/huggingface_hub/package_reference/hf_api, and
https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_assets.exports.record import ExportRecord
from batch_assets.spec.export_options import TRAIN, VALIDATION, ExportError
from batch_assets.spec.exports import PushSpec
from resources.objects.hub_client import TOKEN, TRANSIENT, Passing, hub_api, tried_again
from resources.objects.opening import Objects, StoreError
from resources.store.object_integrity import READ_BYTES, sha256_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

FOLDER, CARD = "data", "README.md"
LONGEST_WAIT = 300.0
MOST_REGULAR_BYTES = 256 << 20  # of files that the hub does not take by LFS: they are in the commit itself
_OURS = re.compile(rf"{FOLDER}/({TRAIN}|{VALIDATION})-\d+\.(jsonl|parquet)")


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the repository holds now. `commit`: its newest; `sent`: names of the files that were sent; () where it had
    all of them, and no commit was made.
    """

    repo: str
    branch: str
    commit: str
    sent: tuple[str, ...]
    changed: bool


def push(
    files: Objects,
    record: ExportRecord,
    card: str,
    to: PushSpec,
    *,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
    sleep: Callable[[float], None] = time.sleep,
) -> Pushed:
    """Have a repository hold the files of a finished export. `folder`: for copies of files that are not on this disk.

    What may pass by itself is tried again for some minutes. Raises ExportError; then the same call goes on.
    """
    api = _api(environment)
    work = _Push(api, files, record, card.encode(), to, folder)

    def once() -> Pushed:
        with _errors(api, to):
            return work.run()

    try:
        return tried_again(once, sleep, LONGEST_WAIT)
    except Passing as passing:
        raise ExportError(f"{passing}; the same command goes on") from None


def _api(environment: Mapping[str, str]) -> HfApi:
    try:
        api = hub_api(environment)
    except StoreError as error:
        raise ExportError(f"push: {error}") from None
    if not api.token:
        raise ExportError(
            f"push: expected a token with write access in the environment variable {TOKEN}, found none; "
            "https://huggingface.co/settings/tokens makes one"
        )
    return api


@dataclass
class _Push:
    """One push over all of its tries. `operations`: files that are sent already, and wait for their commit."""

    api: HfApi
    files: Objects
    record: ExportRecord
    card: bytes
    to: PushSpec
    folder: Path
    operations: dict[str, CommitOperationAdd] = field(default_factory=dict)

    def run(self) -> Pushed:
        """One try. Raises what huggingface_hub raises."""
        from huggingface_hub import CommitOperationDelete

        head = self._head()
        there = {one.path: one for one in self._tree(head)}
        wanted = [f"{FOLDER}/{file.name}" for file in self.record.files]
        changed = [name for name in wanted if not self._is_there(name, there.get(name))]
        gone = sorted(name for name in there.keys() - set(wanted) if _OURS.fullmatch(name))
        card_there = CARD in there and there[CARD].blob_id == _git_hash(len(self.card), [self.card])
        if not changed and not gone and card_there:
            return Pushed(self.to.repo, self.to.branch, head, tuple(sorted(self.operations)), bool(self.operations))
        with contextlib.ExitStack() as open_files:
            additions = [self._sent(name, open_files) for name in changed]
            self._check_regular(additions)
            gone_files = (CommitOperationDelete(name) for name in gone)
            made = self.api.create_commit(
                self.to.repo,
                [*additions, self._addition(CARD, io.BytesIO(self.card)), *gone_files],
                commit_message=f"{self.record.dataset}, version {self.record.version}",
                repo_type="dataset",
                revision=self.to.branch,
                parent_commit=head,
            )
        return Pushed(self.to.repo, self.to.branch, made.oid, tuple(changed), changed=True)

    def _head(self) -> str:
        """The newest commit of the branch; repository and branch are made where there are none."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        repo, branch = self.to.repo, self.to.branch
        try:
            self.api.dataset_info(repo)
        except RepositoryNotFoundError as error:
            if error.response.status_code == 401:  # an unknown token looks like a repository that is hidden
                raise
            self.api.create_repo(repo, repo_type="dataset", private=self.to.private, exist_ok=True)
        try:
            found = self.api.dataset_info(repo, revision=branch)
        except RevisionNotFoundError:
            self.api.create_branch(repo, branch=branch, repo_type="dataset", exist_ok=True)
            found = self.api.dataset_info(repo, revision=branch)
        return str(found.sha)

    def _tree(self, head: str) -> Iterator[RepoFile]:
        from huggingface_hub.hf_api import RepoFile

        for one in self.api.list_repo_tree(self.to.repo, repo_type="dataset", revision=head, recursive=True):
            if isinstance(one, RepoFile):
                yield one

    def _is_there(self, name: str, found: RepoFile | None) -> bool:
        """Whether a file of the repository is the export's, by its checksum: SHA-256 in LFS, else Git's own."""
        file = next(one for one in self.record.files if name == f"{FOLDER}/{one.name}")
        if found is None or found.size != file.bytes:
            return False
        if found.lfs is not None:
            return bool(found.lfs.sha256 == (file.sha256 or sha256_of(self.files, file.name)))
        return bool(found.blob_id == _git_hash(file.bytes, _blocks(self.files, file.name)))

    def _sent(self, name: str, open_files: contextlib.ExitStack) -> CommitOperationAdd:
        """The file in the hub's storage, where it stays without a commit; a small one is only opened."""
        if name in self.operations:
            return self.operations[name]
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(_on_disk(self.files, name.removeprefix(f"{FOLDER}/"), self.folder))
            addition = self._addition(name, opened.enter_context(file.open("rb")))
            self.api.preupload_lfs_files(
                self.to.repo, [addition], repo_type="dataset", revision=self.to.branch, num_threads=1
            )
            if _waits_for_commit(addition):
                open_files.push(opened.pop_all())
            else:
                self.operations[name] = addition
        return addition

    def _addition(self, name: str, data: Any) -> CommitOperationAdd:
        """An open file: whose bytes or path are given, the client sends by Xet."""
        from huggingface_hub import CommitOperationAdd

        return CommitOperationAdd(name, data)

    def _check_regular(self, additions: list[CommitOperationAdd]) -> None:
        size = sum(one.upload_info.size for one in additions if _waits_for_commit(one))
        if size > MOST_REGULAR_BYTES:
            raise ExportError(
                f"push: expected at most {MOST_REGULAR_BYTES >> 20} MiB in files so small that the hub takes them in "
                f"the commit itself, found {size >> 20} MiB; write larger files (part_rows)"
            )


def _waits_for_commit(addition: CommitOperationAdd) -> bool:
    """Its bytes are sent with the commit: it was not uploaded as an LFS object, after which its bytes are let go."""
    return addition.path_or_fileobj != b""


@contextlib.contextmanager
def _on_disk(files: Objects, name: str, folder: Path) -> Iterator[Path]:
    """A file of the export on this disk: itself, or a copy that is gone afterwards."""
    path = Path(files.uri(name))
    if "://" not in files.root and path.is_file():
        yield path
        return
    copy = folder / name
    try:
        with copy.open("wb") as file:
            for block in _blocks(files, name):
                file.write(block)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _blocks(files: Objects, name: str) -> Iterator[bytes]:
    with files.open(name) as opened:
        while block := opened.read(READ_BYTES):
            yield block


def _git_hash(size: int, blocks: Any) -> str:
    """The name of a file's content in Git: SHA-1 over its size and bytes."""
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _errors(api: HfApi, to: PushSpec) -> Iterator[None]:
    """What the hub refuses as ExportError, what may pass as Passing; neither holds the token or a row."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    where = f"push to {to.repo} at {api.endpoint}"
    try:
        yield
    except HFValidationError as error:
        raise ExportError(f"{where}: {error}") from None
    except OfflineModeIsEnabled:
        raise ExportError(f"{where}: expected to be online, found HF_HUB_OFFLINE set") from None
    except (HfHubHTTPError, httpx2.TransportError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        if isinstance(cause, HfHubHTTPError):
            raise _refused(where, cause) from None
        if isinstance(cause, httpx2.TransportError):
            raise Passing(f"{where}: expected an answer, found {type(cause).__name__}") from None
        if isinstance(cause, OSError):  # of this disk
            raise cause from None
        if not isinstance(error, ValueError):
            raise
        raise ExportError(f"{where}: expected an answer of the hub's API, found another ({error!s:.200})") from None


def _refused(where: str, error: Any) -> Exception:
    """The error for an answer with another status than 200."""
    code = error.response.status_code
    words = str(error.server_message or "").partition("\n")[0][:200]
    said = f"{where}: the hub answers {code}{words and f' ({words})'}"
    if code in TRANSIENT:
        return Passing(said, error.response.headers)
    if code == 401:
        return ExportError(f"{said}: expected a token that it knows in {TOKEN}; make another one")
    if code == 403:
        return ExportError(f"{said}: expected a token in {TOKEN} that may write there")
    return ExportError(said)
