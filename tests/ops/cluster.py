"""Replicas, a store and a balancer as processes of their own, and clients that behave as the runbook says.

EFLA_TEST_BIN_DIR holds the programs (default: build/release/bin). All addresses are on 127.0.0.1.
"""
import collections
import faulthandler
import json
import os
import random
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

import grpc

SOURCE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN_DIR = os.environ.get("EFLA_TEST_BIN_DIR") or os.path.join(SOURCE_DIR, "build", "release", "bin")
DEMO = os.path.join(SOURCE_DIR, "model", "demo")
# Packages install daemons in sbin, which is not on every PATH.
os.environ["PATH"] += ":/usr/sbin:/sbin"


def take_flag(name):
    """Whether the command line has this flag; unittest does not see it then."""
    if name not in sys.argv:
        return False
    sys.argv.remove(name)
    return True


def take_value(name, default=None):
    """What follows this flag on the command line, or the default."""
    if name not in sys.argv:
        return default
    at = sys.argv.index(name)
    if at + 1 == len(sys.argv):
        sys.exit(f"{name} needs a value")
    value = sys.argv[at + 1]
    del sys.argv[at:at + 2]
    return value


LONG = take_flag("--long")


# ctest's limit for one of these programs is 300 s (CMakeLists.txt).
MOST_SECONDS = 285


def main():
    if not LONG and "EFLA_CTEST" in os.environ:
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)  # what hangs is named
    unittest.main(verbosity=2, warnings="ignore")


class Scratch:
    """A folder of the test program, with the Python stubs of the protos in it."""

    def __init__(self):
        self.path = tempfile.mkdtemp(prefix="efla_ops.")
        stubs = os.path.join(self.path, "stubs")
        os.mkdir(stubs)
        protos = [os.path.join("efla", "v1", name + ".proto") for name in ("generation", "models", "sessions")]
        subprocess.run(["protoc", "--proto_path=" + os.path.join(SOURCE_DIR, "proto"), "--python_out=" + stubs,
                        "--grpc_out=" + stubs, "--plugin=protoc-gen-grpc=/usr/bin/grpc_python_plugin", *protos],
                       check=True)
        sys.path.insert(0, stubs)

    def remove(self):
        shutil.rmtree(self.path, ignore_errors=True)


def free_port():
    """A port that nobody listens on. Taken below the range of outgoing connections, so that none takes it meanwhile."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def wait_until(condition, what, timeout=20.0):
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(0.02)


def accepts(port):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def http_status(address, path):
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def http_text(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as reply:
        return reply.read().decode()


class Process:
    def __init__(self, command, log, **kwargs):
        self.log = log
        self.output = open(log, "ab")
        # It does not outlive the test program, however that ends.
        self.process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=self.output, stderr=subprocess.STDOUT,
                                        stdin=subprocess.DEVNULL, **kwargs)

    def send(self, number):
        self.process.send_signal(number)

    def running(self):
        return self.process.poll() is None

    def wait(self, timeout=60):
        return self.process.wait(timeout)

    def stop(self, number=signal.SIGTERM, timeout=60):
        if self.running():
            self.send(number)
        try:
            return self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.output.close()

    def text(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()


class Redis:
    def __init__(self, folder, *flags):
        self.port = free_port()
        self.process = Process(["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                                "--appendonly", "no", "--dir", folder, *flags], os.path.join(folder, "redis.log"))
        wait_until(lambda: accepts(self.port), "Redis listens")

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"


class Link:
    """A way to a port that can be cut: bytes stop, and connections neither break nor are refused, as where a network is
    parted. What waited flows when it is mended."""

    def __init__(self, port):
        self.target, self.cut_now, self.closing = port, False, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.pairs = {}  # socket -> its other side
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.closing:
            if self.cut_now:
                time.sleep(0.01)
                continue
            for key, _ in self.selector.select(timeout=0.01):
                if key.fileobj is self.listener:
                    near, far = self.listener.accept()[0], socket.create_connection(("127.0.0.1", self.target))
                    for one, other in ((near, far), (far, near)):
                        self.pairs[one] = other
                        self.selector.register(one, selectors.EVENT_READ)
                elif key.fileobj in self.pairs:
                    self.pass_on(key.fileobj)
        for one in list(self.pairs):
            one.close()
        self.listener.close()

    def pass_on(self, one):
        other = self.pairs[one]
        try:
            some = one.recv(1 << 16)
            if some:
                other.sendall(some)
                return
        except OSError:
            pass
        for end in (one, other):
            self.selector.unregister(end)
            del self.pairs[end]
            end.close()

    def cut(self):
        self.cut_now = True

    def mend(self):
        self.cut_now = False

    def close(self):
        self.closing = True
        self.thread.join()


class Replica:
    """An efla_server that can be started again in the same place."""

    def __init__(self, name, folder, *flags):
        self.name, self.folder, self.flags = name, folder, flags
        self.grpc_port, self.admin_port = free_port(), free_port()
        self.starts = 0
        self.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def admin(self):
        return f"127.0.0.1:{self.admin_port}"

    def start(self, wait=True):
        self.starts += 1
        if self.starts > 1:
            self.process.output.close()
        self.process = Process(
            [os.path.join(BIN_DIR, "efla_server"), "--checkpoint", DEMO, "--device", "cpu", "--threads", "1",
             "--listen", self.address, "--admin", self.admin, "--state-slots", "24", "--max-running", "8",
             "--replica-name", f"{self.name}-{self.starts}", "--log-level", "info", *self.flags],
            os.path.join(self.folder, self.name + ".log"))
        if wait:
            self.wait_ready()

    def wait_ready(self):
        def ready():
            assert self.process.running(), self.process.text()[-3000:]
            return http_status(self.admin, "/readyz") == 200
        wait_until(ready, f"{self.name} is ready", 60)

    def stop(self, **kwargs):
        return self.process.stop(**kwargs)

    def metrics(self):
        return Metrics(http_text(self.admin, "/metrics"))


class Metrics:
    """What one scrape says."""

    def __init__(self, text):
        self.text = text
        self.series = collections.defaultdict(list)  # name -> [(labels, value)]
        self.types, self.helps = {}, {}
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ", 3)
                self.types[name] = kind
            elif line.startswith("# HELP "):
                _, _, name, *rest = line.split(" ", 3)
                self.helps[name] = rest[0] if rest else ""
            elif line:
                match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?", line)
                assert match, line
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
                self.series[match[1]].append((labels, float(match[3])))

    def sum(self, name, **labels):
        assert name in self.series, f"no series {name}"
        return sum(value for found, value in self.series[name]
                   if all(found.get(key) == want for key, want in labels.items()))


def configuration(name, folder, replicas, port, extra_port):
    """deploy/NAME with the test's addresses in place of the names that compose gives, and nothing else changed."""
    with open(os.path.join(SOURCE_DIR, "deploy", name), encoding="utf-8") as file:
        text = file.read()
    for number, replica in enumerate(replicas, 1):
        lines = []
        for line in text.splitlines():
            if f"replica-{number}:50051" in line:
                line = line.replace(f"replica-{number}:50051", replica.address)
                line = line.replace("port 9090", f"port {replica.admin_port}")
            lines.append(line)
        text = "\n".join(lines) + "\n"
    assert "replica-1:" not in text and "replica-2:" not in text
    for old, new in (("listen 50050 ", f"listen 127.0.0.1:{port} "), ("bind :50050 ", f"bind 127.0.0.1:{port} "),
                     ("bind :8404", f"bind 127.0.0.1:{extra_port}"), ("/tmp/nginx", f"{folder}/nginx")):
        text = text.replace(old, new)
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


class Nginx:
    def __init__(self, folder, replicas, edit=lambda text: text):
        self.port, self.extra_port = free_port(), free_port()
        path = configuration("nginx.conf", folder, replicas, self.port, self.extra_port)
        with open(path, encoding="utf-8") as file:
            text = edit(file.read())
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        check = subprocess.run(["nginx", "-t", "-c", path], capture_output=True, text=True)
        assert check.returncode == 0, check.stderr
        directives = "daemon off;" + ("user root;" if os.geteuid() == 0 else "")
        self.process = Process(["nginx", "-c", path, "-g", directives], os.path.join(folder, "nginx.log"))
        wait_until(lambda: accepts(self.port), "nginx listens")

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def reload(self):
        self.process.send(signal.SIGHUP)

    def stop(self):
        self.process.stop()


class Haproxy:
    def __init__(self, folder, replicas):
        self.port, self.extra_port = free_port(), free_port()
        self.path = configuration("haproxy.cfg", folder, replicas, self.port, self.extra_port)
        check = subprocess.run(["haproxy", "-c", "-f", self.path], capture_output=True, text=True)
        assert check.returncode == 0, check.stdout + check.stderr
        assert "warning" not in (check.stdout + check.stderr).lower(), check.stdout + check.stderr
        self.process = Process(["haproxy", "-W", "-db", "-f", self.path], os.path.join(folder, "haproxy.log"))
        wait_until(lambda: accepts(self.port), "HAProxy listens")
        wait_until(lambda: self.states() == ["UP", "UP"], "HAProxy has checked the replicas")

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def states(self):
        rows = http_text(f"127.0.0.1:{self.extra_port}", "/;csv").splitlines()
        head = rows[0].lstrip("# ").split(",")
        servers = [dict(zip(head, row.split(","))) for row in rows[1:] if row.startswith("replicas,replica-")]
        return [server["status"].split(" ")[0] for server in servers]

    def reload(self):
        self.process.send(signal.SIGUSR2)

    def stop(self):
        self.process.stop()


Reply = collections.namedtuple("Reply", "token_ids finished")


def reason(error):
    """The code, and the reason that the details name, or an empty one. Reasons are words in capitals of an ErrorInfo, whose
    first field they are."""
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    found = re.search(rb"google\.rpc\.ErrorInfo\x12.{1,2}\n.([A-Z_]+)", details, re.DOTALL)
    return error.code(), found[1].decode() if found else ""


def is_busy(error):
    """Another call changes the session; it may be asked again as it is."""
    return reason(error) == (grpc.StatusCode.ABORTED, "SESSION_BUSY")


class Client:
    """Makes calls as the runbook advises: UNAVAILABLE before the first event is tried again, when the server says (the
    trailer grpc-retry-pushback-ms) or after a growing pause, and so is CANCELLED, which is what gRPC makes of a call that
    reaches a port as it closes; a turn of a session carries a request id, so that it may be tried again whenever it breaks."""

    LONGEST_S = 40
    REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

    def __init__(self, address, stubs, options=(), credentials=None):
        """Plain text without credentials."""
        # A connection of its own, as another program has.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0),
                   ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500), *options]
        self.channel = (grpc.insecure_channel(address, options=options) if credentials is None
                        else grpc.secure_channel(address, credentials, options=options))
        self.pb = stubs
        self.generation = stubs.generation_grpc.GenerationStub(self.channel)
        self.sessions = stubs.sessions_grpc.SessionsStub(self.channel)
        self.retried = collections.Counter()  # status and words of what was tried again

    def close(self):
        self.channel.close()

    def request(self, prompt, max_tokens, **kwargs):
        return self.pb.generation.GenerateRequest(
            text=prompt, sampling=self.pb.generation.SamplingParams(temperature=0),
            stopping=self.pb.generation.StopParams(max_tokens=max_tokens, ignore_eos=True), **kwargs)

    def turn(self, session, number, tokens, durability="SYNC"):
        """The request of a session's turn, which may be repeated; turn 0 makes the session."""
        request = self.request("Once upon a time" if number == 0 else " And then", tokens, request_id=f"{session}-{number}")
        request.session.session_id = session
        request.session.create_if_missing = number == 0
        request.session.durability = getattr(self.pb.generation, "DURABILITY_" + durability)
        return request

    def once(self, request, timeout=30.0, on_event=None):
        metadata = []
        if request.HasField("session"):
            metadata.append(("x-session-id", request.session.session_id))
        ids, finished = [], None
        for event in self.generation.Generate(request, timeout=timeout, metadata=metadata):
            which = event.WhichOneof("event")
            if which in ("delta", "finished"):
                ids += getattr(event, which).token_ids
            if which == "finished":
                finished = event.finished
            if on_event:
                on_event(event)
        assert finished is not None, "the stream ended without a finished event"
        return Reply(ids, finished)

    def generate(self, request, on_event=None):
        """The reply, after as many attempts as it takes."""
        repeatable = request.HasField("session") and bool(request.request_id)
        end = time.monotonic() + self.LONGEST_S
        pause = 0.1
        while True:
            begun = []

            def note(event):
                begun.append(event)
                if on_event:
                    on_event(event)
            try:
                return self.once(request, on_event=note)
            except grpc.RpcError as error:
                code = error.code()
                # Behind a balancer a replica that dies in mid-stream is INTERNAL or UNKNOWN or CANCELLED from afar.
                broken = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN,
                                  grpc.StatusCode.CANCELLED)
                busy = repeatable and is_busy(error)
                again = (broken or busy) if repeatable else code in self.REFUSED and not begun
                if not again or time.monotonic() > end:
                    raise
                self.retried[f"{code.name}: {error.details()}"] += 1
                pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms")
                time.sleep(int(pushback) / 1e3 if pushback else pause * random.uniform(0.5, 1))
                pause = min(2.0, pause * 2)


class Stubs:
    def __init__(self):
        from efla.v1 import generation_pb2, generation_pb2_grpc, models_pb2, models_pb2_grpc, sessions_pb2, \
            sessions_pb2_grpc
        self.generation, self.generation_grpc = generation_pb2, generation_pb2_grpc
        self.models, self.models_grpc = models_pb2, models_pb2_grpc
        self.sessions, self.sessions_grpc = sessions_pb2, sessions_pb2_grpc


class ClusterTest(unittest.TestCase):
    """A case with programs of its own: `stubs`, and `folder` for its files. What `server` and `client` make is stopped at
    its end; a server has to end well."""

    scratch = stubs = None  # of the test program

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if ClusterTest.scratch is None:
            ClusterTest.scratch = Scratch()
            unittest.addModuleCleanup(ClusterTest.scratch.remove)
            ClusterTest.stubs = Stubs()

    def setUp(self):
        super().setUp()
        self.folder = os.path.join(self.scratch.path, type(self).__name__ + "." + self._testMethodName)
        os.makedirs(self.folder)

    def server(self, *flags, name="server"):
        server = Replica(name, self.folder, *flags)
        self.addCleanup(self.stop_well, server)
        return server

    def stop_well(self, server):
        if server.process.running():
            server.process.send(signal.SIGCONT)
            self.assertEqual(server.stop(), 0, server.process.text()[-3000:])

    def load(self, address, **kwargs):
        """It ends with the case, if not before."""
        load = Load(address, self.stubs, **kwargs)
        self.addCleanup(load.stopping.set)
        return load

    def client(self, server, **kwargs):
        """Of a replica or a balancer."""
        client = Client(server.address, self.stubs, **kwargs)
        self.addCleanup(client.close)
        return client


class Load:
    """Short calls one after the other, from several clients, until stopped; and sessions that each make a turn again and
    again. `reconnect`: each call has a connection of its own. A client gives up after its third failure."""

    MOST_FAILURES = 3

    def __init__(self, address, stubs, callers=3, sessions=(), turn_tokens=12, reconnect=False, **client):
        self.reconnect = reconnect
        self.new_client = lambda: Client(address, stubs, **client)
        self.stopping = threading.Event()
        self.failures, self.calls, self.tokens = [], 0, {}
        self.turns = collections.Counter()
        self.lock = threading.Lock()
        self.retried = collections.Counter()
        self.threads = [threading.Thread(target=self.call, args=(i,), daemon=True) for i in range(callers)]
        self.threads += [threading.Thread(target=self.converse, args=(name, turn_tokens), daemon=True)
                         for name in sessions]
        for thread in self.threads:
            thread.start()

    def fail(self, what, error):
        with self.lock:
            self.failures.append(f"{what}: {error}")

    def call(self, number):
        client = self.new_client()
        expected, failures = None, 0
        while not self.stopping.is_set() and failures < self.MOST_FAILURES:
            try:
                reply = client.generate(client.request("Once upon a time there was a", 12))
            except grpc.RpcError as error:
                self.fail(f"caller {number}", f"{error.code()} {error.details()}")
                failures += 1
                continue
            expected = expected or reply.token_ids
            if reply.token_ids != expected:
                self.fail(f"caller {number}", f"other tokens: {reply.token_ids}")
                failures += 1
            with self.lock:
                self.calls += 1
            if self.reconnect:
                self.done(client)
                client = self.new_client()
        self.done(client)

    def converse(self, name, turn_tokens):
        client = self.new_client()
        tokens = []
        while not self.stopping.is_set():
            turn = self.turns[name]
            try:
                reply = client.generate(client.turn(name, turn, turn_tokens))
            except grpc.RpcError as error:
                self.fail(f"session {name}, turn {turn}", f"{error.code()} {error.details()}")
                break
            tokens += reply.token_ids
            self.turns[name] += 1
            time.sleep(0.02)
        with self.lock:
            self.tokens[name] = tokens
        self.done(client)

    def done(self, client):
        with self.lock:
            self.retried += client.retried
        client.close()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a client hangs"


def say(text):
    print(text, flush=True)
