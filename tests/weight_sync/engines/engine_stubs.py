"""Servers on loopback that answer as SGLang and vLLM do, refuse what these refuse, and load what they are told.

They are strict where the engines are lax: an unknown field, a call out of order or a load while generating is an error.
What the routes, fields and answers are was read from SGLang 0.5.23 (io_struct.py, http_server.py) and vLLM 0.33.0
(entrypoints/rl/online/api_router.py, entrypoints/serve/dev).
"""

import contextlib
import http.server
import json
import threading
import time
import urllib.parse

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.folder import CheckpointFolder


class Stub:
    """What both have in common. `failures`: path to a list of faults, one for each call to come."""

    routes: dict = {}

    def __init__(self):
        self.calls, self.errors = [], []
        self.failures = {}
        self.paused = False
        self.weights = {}
        self.weight_version = "default"

    def answer(self, method, path, query, body):
        """(status, object)."""
        self.calls.append(path)
        fault = self.failures.get(path, []).pop(0) if self.failures.get(path) else None
        if fault is not None:
            return fault
        if (method, path) not in self.routes:
            return self.error(404, f"no such route: {method} {path}")
        fields, parameters, call = self.routes[method, path]
        for name, value in query.items():
            if name not in parameters or not parameters[name](value):
                return self.error(422, f"{path}: query {name}={value!r}")
        if not isinstance(body, dict) and fields:
            return self.error(422, f"{path}: the body is no object")
        for name, (kind, required) in fields.items():
            if required and name not in body:
                return self.error(422, f"{path}: field {name!r} is missing")
            if name in body and not isinstance(body[name], kind):
                return self.error(422, f"{path}: field {name!r} is {body[name]!r}")
        if unknown := set(body or {}) - set(fields):
            return self.error(422, f"{path}: unknown fields {unknown}")
        return getattr(self, call)(body or {}, query)

    def error(self, status, text):
        self.errors.append(text)
        return status, {"detail": text}

    def load(self, folder):
        """Loads over what it has, tensor by tensor, as engines do."""
        with CheckpointFolder(folder) as opened:
            for name in opened.shard_of:
                self.weights[name] = opened.read(name).copy()

    def pause(self, body, query):
        self.paused = True
        return self.paused_answer

    def go_on(self, body, query):
        self.paused = False
        return self.resumed_answer


class SGLangStub(Stub):
    paused_answer = 200, {"message": "Generation paused successfully.", "status": "ok"}
    resumed_answer = 200, {"message": "Generation continued successfully.", "status": "ok"}
    routes = {
        ("POST", "/pause_generation"): ({"mode": (str, False)}, {}, "pause_checked"),
        ("POST", "/continue_generation"): ({"torch_empty_cache": (bool, False)}, {}, "go_on"),
        ("POST", "/flush_cache"): ({}, {"timeout": lambda v: float(v) >= 0}, "flush"),
        ("GET", "/model_info"): ({}, {}, "info"),
        ("POST", "/update_weights_from_disk"): (
            {
                "model_path": (str, True),
                "load_format": ((str, type(None)), False),
                "abort_all_requests": (bool, False),
                "weight_version": ((str, type(None)), False),
                "is_async": (bool, False),
                "torch_empty_cache": (bool, False),
                "keep_pause": (bool, False),
                "recapture_cuda_graph": (bool, False),
                "token_step": (int, False),
                "flush_cache": (bool, False),
            },
            {},
            "update",
        ),
    }

    def pause_checked(self, body, query):
        if body.get("mode", "abort") not in ("abort", "retract", "in_place"):
            return self.error(422, f"mode {body['mode']}")
        self.mode = body.get("mode", "abort")
        return self.pause(body, query)

    def flush(self, body, query):
        if self.mode == "in_place":
            return self.error(400, "requests are running")
        if self.mode == "retract" and float(query.get("timeout", 0)):
            return self.error(400, "Timed out waiting for idle state.")
        return 200, "Cache flushed.\n"

    def update(self, body, query):
        if not self.paused:
            return self.error(400, "it generates")
        if body.get("flush_cache", True) and self.mode == "in_place":
            return self.error(400, "the weights were updated, the cache could not be flushed")
        try:
            self.load(body["model_path"])
        except CheckpointError as error:
            return 400, {"success": False, "message": f"Failed to update weights: {error}.", "num_paused_requests": 0}
        self.weight_version = body.get("weight_version") or self.weight_version
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def info(self, body, query):
        return 200, {"model_path": "model", "weight_version": self.weight_version, "is_generation": True}


class VLLMStub(Stub):
    paused_answer = 200, {"status": "paused"}
    resumed_answer = 200, {"status": "resumed"}
    routes = {
        ("POST", "/pause"): (
            {},
            {"mode": lambda v: v in ("abort", "wait", "keep"), "clear_cache": lambda v: v in ("true", "false")},
            "pause",
        ),
        ("POST", "/resume"): ({}, {}, "go_on"),
        ("POST", "/collective_rpc"): (
            {"method": (str, True), "args": (list, False), "kwargs": (dict, False), "timeout": ((int, float), False)},
            {},
            "rpc",
        ),
        ("POST", "/reset_prefix_cache"): ({}, {}, "reset"),
        ("POST", "/update_weight_version"): ({"new_version": (str, True)}, {}, "set_version"),
        ("GET", "/weight_info"): ({}, {}, "info"),
    }

    def rpc(self, body, query):
        kwargs = body.get("kwargs", {})
        if body["method"] != "reload_weights" or set(kwargs) - {"weights_path", "is_checkpoint_format"}:
            return self.error(500, f"the worker has no {body['method']}({', '.join(kwargs)})")
        if not self.paused:
            return self.error(500, "it generates")
        try:
            self.load(kwargs["weights_path"])
        except CheckpointError as error:
            return 500, {"error": {"message": str(error), "type": "Internal Server Error", "code": 500}}
        return 200, {"results": [None]}

    def reset(self, body, query):
        return 200, {"success": True}

    def set_version(self, body, query):
        self.weight_version = body["new_version"]
        return 200, {"success": True, "new_version": body["new_version"]}

    def info(self, body, query):
        return 200, {"weight_version": self.weight_version}


@contextlib.contextmanager
def serving(stub, api_key=None):
    """The stub's URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.handle_one("GET")

        def do_POST(self):
            self.handle_one("POST")

        def handle_one(self, method):
            parts = urllib.parse.urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if api_key is not None and self.headers.get("Authorization") != f"Bearer {api_key}":
                status, content = 401, {"error": "Unauthorized"}
            else:
                query = dict(urllib.parse.parse_qsl(parts.query))
                status, content = stub.answer(method, parts.path, query, json.loads(data) if data else None)
            if status == "silent":
                stopped.wait(10)
                return
            if status == "closed":
                return
            text = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status if isinstance(status, int) else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            for byte in text[: len(text) // 2] if status == "cut" else text:
                if status == "slow" and not stopped.is_set():
                    time.sleep(0.1)
                with contextlib.suppress(OSError):
                    self.wfile.write(bytes([byte]))

        def log_message(self, *_):
            pass

    stopped = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()
