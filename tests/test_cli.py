import http.server
import json
import threading
from pathlib import Path

import pytest

from miles_mixprec import cli
from miles_mixprec.config import load_fleet

ARTICLE = ["--sessions", "1344", "--available", "h200=24", "b300=24"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_compares_explains_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "fleet" / "mine.yaml"
    target.parent.mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [schema, {fleet: mine}, _self_]\n")
    words = ["plan", *ARTICLE, "--explain", "--compare", "article_homogeneous", "--updates-per-hour", "0"]
    code, out, _ = run(capsys, *words, "--write", str(target), "--", "fleet=article_mixed")
    assert code == 0
    assert "194.16" in out and "262.50" in out and "+35.2%" in out
    assert "limit on h200: one more would save $0.19 per hour" in out
    assert {name: pool.engines for name, pool in load_fleet(conf_dir=tmp_path).pools.items()} == {
        "h200_fp8": 24,
        "b300_nvfp4": 12,
    }
    assert target.read_text().startswith("# Written by `miles-mixprec plan")


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ARTICLE, "--json", "--growth", "60:64000", "140:94000", "--", "fleet=article_mixed"]
    code, out, _ = run(capsys, "plan", *words)
    found = json.loads(out)
    assert code == 0
    assert found["mix"]["engines"] == {"h200_fp8": 24, "b300_nvfp4": 12}
    assert [stage["update"] for stage in found["stages"]] == [60, 140]
    assert found["costs"][0]["accelerator_hourly"] == pytest.approx(194.16)


def test_plan_says_when_mixing_does_not_pay(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "--sessions", "1344", "--", "fleet=article_mixed")
    assert "A mix is not cheaper: 42 engines of h200_fp8 alone cost $190.68/h." in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--", "fleet=article_mixed"], "no demand; state sessions"),
        (["plan", "--sessions", "9", "--available", "h200", "--", "fleet=article_mixed"], "h200: not NAME=VALUE"),
        (["plan", "--sessions", "9", "--available", "h200=x", "--", "fleet=article_mixed"], "h200=x: invalid literal"),
        (["plan", "--sessions", "9", "--growth", "60", "--", "fleet=article_mixed"], "give UPDATE:TOKENS pairs"),
        (["plan", "--sessions", "9", "fleet=nope"], "nope"),
        (["plan", "--sessions", "9", "--bench", "no.json", "--", "fleet=article_mixed"], "No such file or directory"),
        (
            ["plan", "--sessions", "9", "--bench", "/dev/null", "--", "fleet=article_mixed"],
            "not a result of miles-mixprec",
        ),
        (["flags", "fleet.model=[m]"], "fleet.model"),
        (["serve"], "no value for fleet.model, "),
        (["bench", "--pool", "x", "fleet.model=m"], "pool x: not in fleet cpu_quickstart; it has bf16, fp8, nvfp4"),
        (["bench", "--pool", "bf16", "fleet.model=m"], "give --url or fleet.pools.bf16.urls"),
    ],
)
def test_refusals_are_one_line_with_exit_code_two(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert out == ""


def test_doctor_exits_with_one_on_failures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = ["run_dir=r", "run_id=a", "updates=1", "prompts_per_update=1", "fleet.model=m", f"weights.store={tmp_path}"]
    code, out, _ = run(capsys, "doctor", "--engine", "bf16/0=http://127.0.0.1:1", "--json", "--", *keys)
    found = json.loads(out)
    assert code == 1 and found["failed"]
    assert {"subject": "bf16/0", "name": "reachable", "status": "failed"}.items() <= found["checks"][-1].items()
    code, out, _ = run(capsys, "doctor", "--engine", "bf16/0=http://127.0.0.1:1", "--", *keys)
    assert code == 1 and "failed" in out and "reachable" in out


def test_doctor_asks_the_router_for_its_engines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"workers": [{"engine": "fp8/7", "url": "http://127.0.0.1:1"}]}')

        def log_message(self, *args: object) -> None:
            pass

    keys = ["run_dir=r", "run_id=a", "updates=1", "prompts_per_update=1", "fleet.model=m", f"weights.store={tmp_path}"]
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        _, out, _ = run(capsys, "doctor", "--router", url, "--json", "--", *keys)
        server.shutdown()
    assert {"fp8/7", "router"} <= {check["subject"] for check in json.loads(out)["checks"]}
    for wrong in ("http://127.0.0.1:1", "127.0.0.1"):
        code, _, err = run(capsys, "doctor", "--router", wrong, "--", *keys)
        assert code == 2 and f"router {wrong}: " in err and "start it or correct --router" in err


def test_report_compares_several_runs_beside_their_folders(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[Path] = []

    def write(run_dirs: Path | list[str], path: Path | None = None) -> Path:
        written.append(path or Path(str(run_dirs)) / "report.html")
        return written[-1]

    monkeypatch.setattr("miles_mixprec.guard.report.write_report", write)
    monkeypatch.setattr("miles_mixprec.guard.report.write_comparison", write)
    code, out, _ = run(capsys, "report", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0 and out.count("wrote ") == 3
    assert written == [tmp_path / "a" / "report.html", tmp_path / "b" / "report.html", tmp_path / "comparison.html"]


@pytest.mark.parametrize("command", ["plan", "flags", "doctor", "serve", "bench", "report"])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    assert f"examples:\n  miles-mixprec {command}" in capsys.readouterr().out
