"""The coding agent with a scripted policy, a real repository and real grading in local directories."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3_6_coding"
sys.path.insert(0, str(EXAMPLE))
pytest.importorskip("openai")

import agent  # noqa: E402
import grading  # noqa: E402
import sandbox  # noqa: E402

from miles_mixprec.config import load  # noqa: E402

FIX = "sed -i s/a-b/a+b/ add.py"


def git(directory: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    return subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    """A repository with a bug, whose fix waits in a later commit, a branch, a stash and a reflog."""
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q", "-b", "main")
    (repository / "add.py").write_text("def add(a, b):\n    return a-b\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "bug")
    (repository / "add.py").write_text("def add(a, b):\n    return a+b  # the reference\n")
    git(repository, "commit", "-q", "-a", "-m", "fix")
    git(repository, "branch", "solution")
    git(repository, "tag", "v2")
    git(repository, "reset", "-q", "--hard", "HEAD~1")
    (repository / "add.py").write_text("def add(a, b):\n    return b+a  # stashed\n")
    git(repository, "stash", "-q")
    return {
        "directory": str(repository),
        "tests": {"hidden/test_add.py": "from add import add\nassert add(2, 3) == 5\n"},
        "test_command": f"PYTHONPATH=. {sys.executable} hidden/test_add.py",
        "timeout_s": 30,
    }


def call(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": json.dumps({"command": command})}


def play(task: dict[str, Any], replies: list[Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the agent against a policy that gives `replies` in turn, the last one for ever."""
    asked: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        reply = replies[min(len(asked), len(replies)) - 1]
        message: dict[str, Any] = {"role": "assistant", "content": reply if isinstance(reply, str) else None}
        if not isinstance(reply, str):
            message["tool_calls"] = [{"id": f"call-{len(asked)}", "type": "function", "function": reply}]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    async def run() -> dict[str, Any]:
        app = web.Application()
        app.add_routes([web.post("/sessions/s/v1/chat/completions", complete)])
        server = TestServer(app)
        await server.start_server()
        try:
            url = str(server.make_url("/sessions/s"))
            return await agent.run(url, "Fix add.", {"temperature": 1.0, "return_meta_info": True}, task)
        finally:
            await server.close()

    return asyncio.run(run()), asked


def test_a_fix_that_is_submitted_scores_one(task: dict[str, Any]) -> None:
    found, asked = play(task, [call("cat add.py"), call(FIX), call(f"echo {agent.SUBMIT}")])
    assert found == {"reward": 1.0, "exit_status": "submitted", "turns": 3}
    assert "return a-b" in asked[1]["messages"][-1]["content"]
    assert asked[0]["return_meta_info"] is True, "the arm's request fields reach the engine"
    assert "return a-b" in (Path(task["directory"]) / "add.py").read_text(), "episodes never touch the task"


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([call("true"), call(f"echo {agent.SUBMIT}")], {"reward": 0.0, "exit_status": "submitted", "turns": 2}),
        ([call("echo x=1 >> add.py; echo " + agent.SUBMIT)], {"reward": 0.0, "exit_status": "submitted", "turns": 1}),
        ([call(FIX), "done!"], {"reward": 0.0, "exit_status": "format_error", "turns": 4}),
        (
            [{"name": "bash", "arguments": "{oops"}, "text", {"name": "python", "arguments": "{}"}],
            {"reward": 0.0, "exit_status": "format_error", "turns": 3},
        ),
    ],
)
def test_what_the_policy_did_wrong_scores_zero(task: dict[str, Any], replies: list[Any], expected: dict) -> None:
    assert play(task, replies)[0] == expected


def test_new_and_binary_files_are_part_of_the_patch(task: dict[str, Any]) -> None:
    blob = r"head -c 20000 /dev/urandom > blob.bin; printf 'caf\351\n' > latin.txt"
    task["test_command"] += " && test $(stat -c %s blob.bin) = 20000 && test $(stat -c %s latin.txt) = 5"
    found, _ = play(task, [call(FIX), call(blob), call(f"echo {agent.SUBMIT}")])
    assert found["reward"] == 1.0


def test_nothing_of_the_reference_is_left(task: dict[str, Any]) -> None:
    async def run() -> tuple[str, str, str]:
        place = sandbox.DirectorySandbox(Path(task["directory"]))
        try:
            await grading.prepare(place)
            log = await place.run("git log --all --oneline", timeout_s=30)
            objects = await place.run(
                "git cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' | "
                "while read name type; do [ $type = blob ] && git cat-file -p $name; done; true",
                timeout_s=30,
            )
            return log.text, objects.text, (await place.run("git stash list; git reflog; git tag", timeout_s=30)).text
        finally:
            await place.close()

    log, objects, rest = asyncio.run(run())
    assert "fix" not in log and log.count("\n") <= 1
    assert "a-b" in objects and "reference" not in objects and "stashed" not in objects
    assert rest.strip() == ""


def test_commands_are_bounded_in_time_and_length(tmp_path: Path) -> None:
    async def run() -> list[sandbox.Output]:
        place = sandbox.DirectorySandbox(tmp_path)
        try:
            return [
                await place.run("yes line | head -c 100000; exit 3", timeout_s=30),
                await place.run("sleep 60", timeout_s=0.5),
                await place.run("sleep 60 & echo detached", timeout_s=30),
            ]
        finally:
            await place.close()

    long, slow, detached = asyncio.run(run())
    assert long.status == 3 and len(long.text) < 10_200 and "90000 bytes left out" in long.text
    assert slow.status == sandbox.TIMED_OUT
    assert detached == sandbox.Output("detached\n", 0)


def test_a_broken_sandbox_aborts_the_sample(tmp_path: Path) -> None:
    (tmp_path / "not-a-repository").mkdir()
    found, _ = play({"directory": str(tmp_path / "not-a-repository")}, [])
    assert (found["reward"], found["exit_status"]) == (None, "sandbox_error")

    class Sample(SimpleNamespace):
        Status = SimpleNamespace(ABORTED="aborted")

    sample = Sample(metadata=found, status="completed")
    assert asyncio.run(agent.reward(None, sample)) == 0.0
    assert sample.status == "aborted"
    assert asyncio.run(agent.reward(None, Sample(metadata={"reward": 1.0}, status="completed"))) == 1.0
    with pytest.raises(KeyError):
        asyncio.run(agent.reward(None, Sample(metadata={}, status="completed")))


@pytest.mark.parametrize("fleet", ["planned", "article_mixed", "article_homogeneous"])
def test_the_run_composes_on_every_shipped_fleet(fleet: str) -> None:
    config = load("qwen3_6_coding", [f"fleet={fleet}"], conf_dir=EXAMPLE / "conf")
    assert config.algo.name == "sc_mis_top_p"
    assert config.fleet.slots >= 1344
    assert (config.prompts_per_update, config.samples_per_prompt) == (128, 8)
