"""Where an episode's commands run: a Modal sandbox without network, or a plain directory for tests and tiny tasks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

HEAD_BYTES = TAIL_BYTES = 5_000
TIMED_OUT = 124


@dataclass(frozen=True)
class Output:
    """What a command printed, bounded to its first and last bytes, and its exit status (124: it ran out of time)."""

    text: str
    status: int


class Sandbox(Protocol):
    async def run(self, command: str, *, timeout_s: float) -> Output:
        """Run `command` with bash in the repository. Raises SandboxError when the sandbox itself fails."""

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, relative to the repository."""

    async def close(self) -> None:
        """Throw the sandbox away."""


class SandboxError(Exception):
    """The infrastructure failed, not the policy: the episode must not be trained on."""


def bounded(command: str, timeout_s: float) -> str:
    """`command` under a time limit, with its output cut inside the sandbox: neither length nor children leak out."""
    inner = shlex.quote(command)
    return (
        f"out=$(mktemp); timeout -k 5 {timeout_s:g} bash -c {inner} >$out 2>&1 </dev/null; status=$?; "
        f"size=$(stat -c %s $out); if [ $size -gt {HEAD_BYTES + TAIL_BYTES} ]; then head -c {HEAD_BYTES} $out; "
        f'echo; echo "... $((size - {HEAD_BYTES + TAIL_BYTES})) bytes left out ..."; tail -c {TAIL_BYTES} $out; '
        "else cat $out; fi; rm -f $out; exit $status"
    )


class ModalSandbox:
    """A container of the task's image. Needs Modal credentials; created with `await ModalSandbox.create(...)`."""

    def __init__(self, sandbox: Any, repository: str) -> None:
        self._sandbox, self._repository = sandbox, repository

    @classmethod
    async def create(cls, image: str, repository: str, *, lifetime_s: int = 7200) -> ModalSandbox:
        import modal

        try:
            app = await modal.App.lookup.aio("mixprec-sandboxes", create_if_missing=True)
            sandbox = await modal.Sandbox.create.aio(
                "sleep", "infinity",
                app=app, image=modal.Image.from_registry(image), timeout=lifetime_s, block_network=True,
                cpu=2, memory=8192, workdir=repository,
            )  # fmt: skip
        except modal.exception.Error as error:
            raise SandboxError(f"sandbox of {image} does not start: {error}") from error
        return cls(sandbox, repository)

    async def run(self, command: str, *, timeout_s: float) -> Output:
        import modal

        try:
            process = await self._sandbox.exec.aio("bash", "-c", bounded(command, timeout_s), workdir=self._repository)
            text = await process.stdout.read.aio()
            return Output(text, await process.wait.aio())
        except modal.exception.Error as error:
            raise SandboxError(f"command lost: {error}") from error

    async def write(self, path: str, content: bytes) -> None:
        target = shlex.quote(f"{self._repository}/{path}")
        process = await self._sandbox.exec.aio("bash", "-c", f"mkdir -p $(dirname {target}) && cat >{target}")
        process.stdin.write(content)
        process.stdin.write_eof()
        await process.stdin.drain.aio()
        await process.wait.aio()

    async def close(self) -> None:
        await self._sandbox.terminate.aio()


class DirectorySandbox:
    """A copy of a directory on this machine. No isolation whatsoever: for tests and commands that you trust."""

    def __init__(self, source: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="episode-"))
        shutil.copytree(source, self.root, dirs_exist_ok=True, symlinks=True)

    async def run(self, command: str, *, timeout_s: float) -> Output:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", bounded(command, timeout_s),
            cwd=self.root, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        text, _ = await process.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children that the command left behind
        return Output(text.decode(errors="replace"), process.returncode or 0)

    async def write(self, path: str, content: bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    async def close(self) -> None:
        shutil.rmtree(self.root)
