"""Starting, refusing and stopping a run's services. Whole fleets start in tests/examples."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from test_flags import load

from miles_mixprec import serve
from miles_mixprec.config import Pool
from miles_mixprec.errors import CapabilityError, ConfigError, EngineError
from miles_mixprec.providers.base import Engine


def test_a_run_folder_belongs_to_one_configuration(tmp_path):
    serve.claim_run_dir(load(run_dir=tmp_path))
    serve.claim_run_dir(
        load("updates=9", "guard.action=stop", "router.port=1", run_dir=tmp_path)
    )  # resumed for longer
    with pytest.raises(ConfigError, match=r"another algo; choose another run_dir"):
        serve.claim_run_dir(load("algo=grpo", run_dir=tmp_path))
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["updates"] == 9


def test_pools_of_one_view_must_agree_on_execution(tmp_path):
    config = load(run_dir=tmp_path)
    config.fleet.pools["other"] = Pool(view="fp8", slots_per_engine=1)
    with pytest.raises(ConfigError, match="pools of view fp8 differ in execution"):
        serve.start_models(config)


class Answer(BaseHTTPRequestHandler):
    """An engine that answers every request with the same body."""

    body = b""

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *args): ...


@pytest.fixture
def answering():
    servers = []

    def start(body):
        handler = type("Handler", (Answer,), {"body": body})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return Engine("fp8", 0, f"http://127.0.0.1:{server.server_address[1]}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


ONE_CANDIDATE = {"meta_info": {"weight_version": "0", "output_top_logprobs": [[[-0.1, 5, None]]]}}


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"text": "hello"}', json.dumps(ONE_CANDIDATE).encode()])
def test_an_engine_that_answers_garbage_stops_the_start(answering, body):
    with pytest.raises(EngineError, match=r"pool fp8: engine fp8/0 .* answers garbage"):
        asyncio.run(serve.require_capabilities(load(), [answering(body)]))


def test_an_engine_that_ignores_the_temperature_stops_the_start(answering):
    entries = [[-0.1 * i, i, None] for i in range(8)]
    meta = {"output_token_logprobs": [entries[0]], "output_top_logprobs": [entries], "weight_version": "0"}
    with pytest.raises(
        CapabilityError, match=r"pool fp8: engine fp8/0: log-prob temperature: .*RETURN_ORIGINAL_LOGPROB"
    ):
        asyncio.run(serve.require_capabilities(load(), [answering(json.dumps({"meta_info": meta}).encode())]))


def test_a_service_that_ends_is_named_with_its_cause(tmp_path):
    services = serve.Services(load(run_dir=tmp_path))
    serve._start(services, "sidecars", "-c", "raise SystemExit('store is gone')")
    try:
        services.processes["sidecars"]._reaper.wait(timeout=60)
        with pytest.raises(EngineError, match=r"sidecars ended with status 1: store is gone; see .*sidecars\.log"):
            services.check()
    finally:
        services.stop()
