"""A process that answers like an SGLang server, started with SGLang's arguments. Options come from FAKE_ENGINE (JSON).

`fail`: exit at once with this message. `capacity`: turns served at once, the rest queue. `turn_s`: time of a turn.
`ignore_sigterm`: do not end when asked. `child`: start a grandchild and write its pid to this file.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OPTIONS = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
SLOTS = threading.Semaphore(OPTIONS.get("capacity", 1000))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/server_info":
            return self.reply(200, {"version": "0.5.23", "pid": os.getpid(), "argv": sys.argv[1:]} | dict(ENVIRONMENT))
        return self.reply(200 if self.path in ("/health", "/model_info") else 404, {"weight_version": "0"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with SLOTS:
            time.sleep(OPTIONS.get("turn_s", 0))
        count = body["sampling_params"]["max_new_tokens"]
        self.reply(200, {"output_ids": [7] * count, "meta_info": {"weight_version": "0", "prompt_tokens": 1}})

    def reply(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


ENVIRONMENT = {"environment": {k: v for k, v in os.environ.items() if k.startswith(("SGLANG", "CUDA", "OMP", "TEST"))}}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    if "fail" in OPTIONS:
        print("Traceback (most recent call last):\n  File x, line 1\n" + OPTIONS["fail"] + "\n\n", flush=True)
        sys.exit(3)
    if OPTIONS.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in OPTIONS:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(OPTIONS["child"], "w") as file:
            file.write(str(child.pid))
    Server((arguments.host, arguments.port), Handler).serve_forever()
