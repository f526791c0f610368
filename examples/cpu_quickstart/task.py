"""The task: put digits in order by calling a tool, one swap a turn.

The policy sees `sort 7 2 9 4` and answers each turn with one strict call, `<tool_call>swap 1 2</tool_call>` (positions
count from 1) or `<tool_call>done</tool_call>`. The tool replies with the new row. The reward is 1 if the calls,
replayed in a fresh environment, end in a sorted row and `done`; anything that does not parse is a format error.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_mixprec.rollout.environment import Step

CALL = re.compile(r"<tool_call>(?:swap (\d) (\d)|(done))</tool_call>")
END = "<|im_end|>"
FORMAT_ERRORS_ALLOWED = 2


def prompt_text(row: list[int]) -> str:
    return f"<|im_start|>user\nsort {_join(row)}{END}\n<|im_start|>assistant\n"


def tool_text(content: str) -> str:
    return f"\n<|im_start|>tool\n{content}{END}\n<|im_start|>assistant\n"


@dataclass
class Row:
    """The state that the tool acts on."""

    digits: list[int]

    def swap(self, first: int, second: int) -> bool:
        """Exchange two positions, counted from 1; False if one does not exist."""
        if not (1 <= first <= len(self.digits) and 1 <= second <= len(self.digits)):
            return False
        i, j = first - 1, second - 1
        self.digits[i], self.digits[j] = self.digits[j], self.digits[i]
        return True


@dataclass
class SortBySwaps:
    """`miles_mixprec.rollout.environment.Environment` of one episode."""

    start: list[int]
    row: Row
    calls: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False
    format_errors: int = 0

    @classmethod
    def from_sample(cls, prompt: str, label: str | None, metadata: dict[str, Any]) -> SortBySwaps:
        assert label is not None
        start = json.loads(label)
        return cls(start=start, row=Row(list(start)))

    def step(self, reply: str) -> Step:
        match = CALL.fullmatch(reply.removesuffix(END))
        if match and match[3]:
            self.finished = True
            return Step(done=True)
        if match and self.row.swap(int(match[1]), int(match[2])):
            self.calls.append((int(match[1]), int(match[2])))
            return Step(observation=tool_text(_join(self.row.digits)))
        self.format_errors += 1
        over = self.format_errors >= FORMAT_ERRORS_ALLOWED
        return Step(observation="" if over else tool_text("error"), done=over, format_error=True)

    def grade(self) -> float:
        """Replay the accepted calls on a fresh row; 1.0 if that row is sorted and the policy said so."""
        fresh = Row(list(self.start))
        return float(self.finished and all(fresh.swap(*call) for call in self.calls) and _sorted(fresh.digits))


def draw_rows(seed: int, length: int) -> Iterator[list[int]]:
    """Unsorted rows of distinct digits, forever, determined by `seed`."""
    rng = random.Random(seed)
    while True:
        row = rng.sample(range(10), length)
        if not _sorted(row):
            yield row


def write_prompts(path: Path, count: int, seed: int, length: int) -> None:
    """`count` prompts as the JSON lines that Miles' data source reads."""
    rows = draw_rows(seed, length)
    with path.open("w") as file:
        for _ in range(count):
            row = next(rows)
            file.write(json.dumps({"prompt": prompt_text(row), "label": json.dumps(row)}) + "\n")


def demonstration(row: list[int], rng: random.Random, mistakes: float) -> Iterator[tuple[str, bool]]:
    """(text, trained) pieces of one episode by selection sort that errs with probability `mistakes` a turn."""
    state = Row(list(row))
    yield prompt_text(row), False
    for _ in range(len(row) + 2):
        if rng.random() < mistakes:
            call: tuple[int, int] | None = tuple(rng.sample(range(1, len(row) + 1), 2))  # type: ignore[assignment]
            if rng.random() < 0.3:
                call = None
        else:
            call = _next_swap(state.digits)
        if call is None:
            yield f"<tool_call>done</tool_call>{END}", True
            return
        state.swap(*call)
        yield f"<tool_call>swap {call[0]} {call[1]}</tool_call>{END}", True
        yield tool_text(_join(state.digits)), False


def _next_swap(digits: list[int]) -> tuple[int, int] | None:
    for place, wanted in enumerate(sorted(digits)):
        if digits[place] != wanted:
            return place + 1, digits.index(wanted) + 1
    return None


def _join(digits: list[int]) -> str:
    return " ".join(map(str, digits))


def _sorted(digits: list[int]) -> bool:
    return digits == sorted(digits)
