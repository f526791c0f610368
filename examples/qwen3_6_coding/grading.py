"""Task start, patch and verdict of one coding episode.

A task is the metadata of a Miles sample:

    {"image": "registry/image:tag", "repository": "/workspace", "tests": {"tests/test_x.py": "..."},
     "test_command": "python -m pytest -q tests/test_x.py", "timeout_s": 1200}

The hidden tests enter a sandbox only after the episode. The patch, and nothing else, crosses into a fresh sandbox.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sandbox import Sandbox, SandboxError

OpenSandbox = Callable[[Mapping[str, Any]], Awaitable[Sandbox]]
SETUP_S = 240.0
PART_BYTES = 6000

# Nothing but the history of HEAD survives: later commits, other branches, stashes and logs may hold the reference fix.
FORGET = """set -e
git checkout -q --detach
git for-each-ref --format='delete %(refname)' | git update-ref --stdin
for remote in $(git remote); do git remote remove "$remote"; done
rm -rf .git/logs .git/ORIG_HEAD .git/FETCH_HEAD .git/packed-refs
find .git/objects/pack -name '*.keep' -o -name '*.promisor' | xargs -r rm -f
git reflog expire --expire=now --expire-unreachable=now --all
git gc --quiet --prune=now
git ls-files -z | xargs -0 -r touch -h"""
TREE = "GIT_INDEX_FILE=.git/episode-index git add -A && GIT_INDEX_FILE=.git/episode-index git write-tree"


async def prepare(sandbox: Sandbox) -> str:
    """Remove what the policy must not see and return the id of the tree that the task starts from."""
    await _must(sandbox, FORGET, SETUP_S)
    return (await _must(sandbox, TREE, SETUP_S)).strip()


async def patch_since(sandbox: Sandbox, start: str) -> bytes:
    """Everything that changed since `start`, untracked files included, as a binary-safe git patch."""
    now = (await _must(sandbox, TREE, SETUP_S)).strip()
    size = await _must(sandbox, f"git diff --binary {start} {now} >.git/episode.patch; wc -c <.git/episode.patch", 60)
    patch = b""
    while len(patch) < int(size):  # in parts, since the output of a command is bounded
        part = f"tail -c +{len(patch) + 1} .git/episode.patch | head -c {PART_BYTES} | base64 -w0"
        patch += base64.b64decode(await _must(sandbox, part, 60))
    return patch


async def grade(task: Mapping[str, Any], patch: bytes, open_sandbox: OpenSandbox) -> float:
    """1.0 if the hidden tests pass on `patch` in a fresh sandbox, else 0.0.

    Raises SandboxError when the sandbox, not the patch, is at fault.
    """
    if not patch.strip():
        return 0.0
    sandbox = await open_sandbox(task)
    try:
        await prepare(sandbox)
        await sandbox.write(".git/episode.patch", patch)
        digest = (await _must(sandbox, "sha256sum .git/episode.patch", 60)).split()[0]
        if digest != hashlib.sha256(patch).hexdigest():
            raise SandboxError("the patch changed on its way into the grading sandbox")
        applied = await sandbox.run("git apply --binary --whitespace=nowarn .git/episode.patch", timeout_s=120)
        if applied.status != 0:
            raise SandboxError(f"the patch does not apply to its own start: {applied.text[:300]}")
        for path, content in task["tests"].items():
            await sandbox.write(path, content.encode())
        verdict = await sandbox.run(task["test_command"], timeout_s=task["timeout_s"])
        return float(verdict.status == 0)
    finally:
        await sandbox.close()


async def _must(sandbox: Sandbox, command: str, timeout_s: float) -> str:
    output = await sandbox.run(command, timeout_s=timeout_s)
    if output.status != 0:
        raise SandboxError(f"{command.splitlines()[-1][:80]}: status {output.status}: {output.text[-300:]}")
    return output.text
