"""A bash agent for the session-server flow: `rollout.agent=agent.run`, `--custom-rm-path agent.reward`.

Every turn is one call of the `bash` tool; the episode ends when a command prints SUBMIT, when turns or time run out,
or after FORMAT_ERRORS replies in a row without a valid call. Only submitted work is graded. What the policy did wrong
scores 0; what the infrastructure did wrong aborts the sample.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grading import grade, patch_since, prepare
from openai import AsyncOpenAI
from sandbox import DirectorySandbox, ModalSandbox, Sandbox, SandboxError

SUBMIT = "MIXPREC_TASK_COMPLETE"
FORMAT_ERRORS = 3
MAX_TURNS, EPISODE_S, COMMAND_S = 500, 7200.0, 300.0
SYSTEM = (
    "You fix a repository. Work with the bash tool, one command a turn; the working directory is the repository. "
    f"When the task is done, run: echo {SUBMIT}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command in the repository.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


async def open_sandbox(task: Mapping[str, Any]) -> Sandbox:
    """A sandbox of the task's image, or of a local directory where the task names one."""
    if "directory" in task:
        return DirectorySandbox(Path(task["directory"]))
    return await ModalSandbox.create(task["image"], task["repository"])


async def run(
    base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **_: Any
) -> dict[str, Any]:
    """One episode. Returns `{"reward", "exit_status", "turns"}`, reward None where the infrastructure failed."""
    turns = 0
    try:
        sandbox = await open_sandbox(metadata)
        try:
            start = await prepare(sandbox)
            exit_status, turns = await _episode(base_url, prompt, request_kwargs, sandbox)
            patch = await patch_since(sandbox, start)
        finally:
            await sandbox.close()
        reward = await grade(metadata, patch, open_sandbox) if exit_status == "submitted" else 0.0
    except SandboxError as error:
        return {"reward": None, "exit_status": "sandbox_error", "turns": turns, "detail": str(error)}
    return {"reward": reward, "exit_status": exit_status, "turns": turns}


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """The episode's reward; infrastructure failures abort the sample. Raises KeyError if the episode left none."""
    value = sample.metadata["reward"]
    if value is None:
        sample.status = type(sample).Status.ABORTED
        return 0.0
    assert value in (0.0, 1.0), f"reward {value} is not binary"
    return float(value)


async def _episode(base_url: str, prompt: Any, request_kwargs: dict[str, Any], sandbox: Sandbox) -> tuple[str, int]:
    """Drive the model until the episode ends; returns (exit status, turns)."""
    problem = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, *problem]
    fields = dict(request_kwargs)
    headers = fields.pop("extra_headers", None)
    base_url = base_url if base_url.endswith("/v1") else f"{base_url}/v1"
    deadline, wrong = time.monotonic() + EPISODE_S, 0
    # No retries: a hidden one could overlap with the turn that it repeats.
    async with AsyncOpenAI(
        base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0
    ) as client:
        for turn in range(1, MAX_TURNS + 1):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, timeout=3600, extra_headers=headers, extra_body=fields
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            command = command_of(message.tool_calls)
            if command is None:
                wrong += 1
                if wrong == FORMAT_ERRORS:
                    return "format_error", turn
                messages.append(_complaint(message.tool_calls))
                continue
            wrong = 0
            output = await sandbox.run(command, timeout_s=min(COMMAND_S, max(1.0, deadline - time.monotonic())))
            if SUBMIT in output.text and output.status == 0:
                return "submitted", turn
            content = f"{output.text}\n[exit status {output.status}]"
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": content})
            if time.monotonic() > deadline:
                return "time_limit", turn
    return "turn_limit", MAX_TURNS


def command_of(tool_calls: Any) -> str | None:
    """The command of a reply with exactly one valid call of `bash`, else None."""
    if not tool_calls or len(tool_calls) != 1 or tool_calls[0].function.name != "bash":
        return None
    try:
        command = json.loads(tool_calls[0].function.arguments)["command"]
    except (ValueError, KeyError, TypeError):
        return None
    return command if isinstance(command, str) and command.strip() else None


def _complaint(tool_calls: Any) -> dict[str, Any]:
    text = "Reply with exactly one call of the bash tool, with a command."
    if tool_calls:
        return {"role": "tool", "tool_call_id": tool_calls[0].id, "content": text}
    return {"role": "user", "content": text}
