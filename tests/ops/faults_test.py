"""What the runbook promises when things go wrong, on one server or two without a balancer.

usage: faults_test.py [--long] [unittest arguments]
"""
import collections
import itertools
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time

import grpc

import cluster
from cluster import ClusterTest, Link, Nginx, Redis, say, wait_until


def timed(client, milliseconds):
    request = client.request("Once", 1_000_000)
    request.time_budget_ms = milliseconds
    return request


class ClientsTest(ClusterTest):
    """Clients, and the server's own end."""

    def endless_program(self, server):
        """A program of its own with an endless stream, which can be frozen."""
        code = ("import sys, time; sys.path.insert(0, sys.argv[1]); sys.path.insert(0, sys.argv[2])\n"
                "import cluster; stubs = cluster.Stubs(); client = cluster.Client(sys.argv[3], stubs, [('grpc.http2.bdp_probe', 0)])\n"
                "stream = client.generation.Generate(client.request('Once', 1000000))\n"
                "[next(stream) for _ in range(5)]; print('began', flush=True)\n"
                "for event in stream: pass\n")
        process = subprocess.Popen([sys.executable, "-c", code, os.path.join(self.scratch.path, "stubs"), os.path.dirname(os.path.abspath(__file__)),
                                    server.address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "began\n")
        return process

    def test_a_drain_has_two_phases(self):
        server = self.server("--drain-delay", "1.5")
        client = self.client(server)
        client.once(client.turn("left-behind", 0, 2, durability="NONE"))
        stream = client.generation.Generate(timed(client, 4000))
        for _ in range(3):
            next(stream)
        began = time.monotonic()
        server.process.send(signal.SIGTERM)
        wait_until(lambda: cluster.http_status(server.admin, "/readyz") == 503, "not ready", 1)
        self.assertEqual(cluster.http_status(server.admin, "/lbz"), 404)
        self.assertEqual(cluster.http_status(server.admin, "/livez"), 200)
        calls = 0
        while time.monotonic() < began + 1.2:  # the first phase: all are served
            client.once(client.request("Once", 1))
            calls += 1
        self.assertGreater(calls, 5)
        wait_until(lambda: not cluster.accepts(server.grpc_port), "the port closes", 2)
        self.assertGreaterEqual(time.monotonic() - began, 1.4)
        with self.assertRaises(grpc.RpcError) as refused:
            self.client(server).once(client.request("Once", 1))
        self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
        events = list(stream)  # the running one ends as it would have
        self.assertEqual(events[-1].WhichOneof("event"), "finished")
        self.assertEqual(server.process.wait(), 0)
        self.assertRegex(server.process.text(), "sessions_drained: .* sessions=1 kept=0 lost=1 names=left-behind ")
        say(f"  {calls} calls in the first phase; the server ended after {time.monotonic() - began:.1f} s")

    def test_connections_grow_old_and_streams_outlive_them(self):
        server = self.server("--max-connection-age", "1")
        client = self.client(server)
        stream = client.generation.Generate(timed(client, 4000))
        next(stream)
        end = time.monotonic() + 4
        calls = 0
        while time.monotonic() < end or calls < 20:
            client.once(client.request("Once", 1))
            calls += 1
        self.assertEqual(list(stream)[-1].WhichOneof("event"), "finished")

    def test_a_client_that_vanishes_gives_its_slot_back(self):
        server = self.server("--keepalive-time", "1", "--slow-reader-timeout", "600", "--prefix-cache-slots", "0")
        program = self.endless_program(server)
        self.assertEqual(server.metrics().sum("efla_requests_running"), 1)
        program.send_signal(signal.SIGSTOP)  # its machine acknowledges bytes still; nobody answers pings
        began = time.monotonic()
        wait_until(lambda: server.metrics().sum("efla_state_slots", kind="free") == 24, "the slot is free", 30)
        say(f"  a vanished client's slot was free after {time.monotonic() - began:.1f} s (--keepalive-time 1, 10 s to answer)")

    def test_a_client_that_does_not_read_is_parked_and_then_ended(self):
        server = self.server("--keepalive-time", "600", "--slow-reader-timeout", "2")
        program = self.endless_program(server)
        program.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        client = self.client(server)
        wait_until(lambda: server.metrics().sum("efla_requests_parked") == 1, "it is parked", 90)
        parked = time.monotonic() - began
        wait_until(lambda: server.metrics().sum("efla_requests_parked") + server.metrics().sum("efla_requests_running") == 0, "it is ended", 10)
        say(f"  parked after {parked:.1f} s, ended after {time.monotonic() - began:.1f} s")
        client.once(client.request("Once", 4))

    def test_clients_with_closed_windows_hold_up_nobody_and_are_ended(self):
        server = self.server("--slow-reader-timeout", "2", "--keepalive-time", "600")
        deaf, client = DeafClient(server.grpc_port), self.client(server)
        self.addCleanup(deaf.socket.close)
        began = time.monotonic()
        for request in [client.request("Once", 4, samples=60) for _ in range(4)] + [client.request("Once", 4) for _ in range(5)]:
            deaf.generate(request)
        wait_until(lambda: server.metrics().sum("efla_grpc_streams_active") == 9, "they are there", 2)
        wait_until(lambda: server.metrics().sum("efla_requests_waiting") + server.metrics().sum("efla_requests_running") == 0,
                   "all of it is computed")
        client.once(client.request("Once", 4, samples=10))
        wait_until(lambda: server.metrics().sum("efla_grpc_streams_active") == 0, "they are ended", 10)
        ended = time.monotonic() - began
        self.assertGreater(ended, 4)
        self.assertRegex(server.process.text(), "RESOURCE_EXHAUSTED.*the client took nothing for 4000 ms")
        deaf.generate(client.request("Once", 4, samples=60))
        deaf.generate(client.request("Once", 1_000_000, samples=2))
        wait_until(lambda: server.metrics().sum("efla_requests_parked") == 2, "its samples wait for their reader")
        began = time.monotonic()
        self.assertEqual(server.process.stop(), 0)
        say(f"  calls that nobody reads were gone after {ended:.1f} s (--slow-reader-timeout 2); with two more the server ended within "
            f"{time.monotonic() - began:.1f} s")

    def test_progress_events_keep_a_long_prompt_alive_through_a_proxy(self):
        server = self.server()
        # nginx with a read timeout of two seconds in place of an hour.
        nginx = Nginx(self.folder, [server, server], edit=lambda text: text.replace("grpc_read_timeout 1h", "grpc_read_timeout 2s")
                      .replace(f"        server {server.address} max_fails=0;\n", "", 1))
        self.addCleanup(nginx.stop)
        client = self.client(nginx)

        def long_prompt(progress):
            request = client.request("", 1)
            request.ClearField("text")
            request.token_ids.ids.extend([5 + i % 1000 for i in range(tokens)])
            request.output.progress = progress
            request.use_prefix_cache = False
            return request
        # As many tokens as keep this machine busy for well above two seconds.
        tokens, total = 6_000, 0
        while total < 4:
            tokens = int(tokens * 6 / total) if total else tokens
            gaps, last, events = [], time.monotonic(), []
            for event in client.generation.Generate(long_prompt(True), timeout=120):
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                events.append(event.WhichOneof("event"))
            self.assertEqual(events[-1], "finished")
            total = sum(gaps)
        say(f"  {events.count('progress')} progress events in {total:.1f} s of a prefill of {tokens} tokens, {max(gaps) * 1e3:.0f} ms "
            f"apart at most")
        self.assertGreater(events.count("progress"), 10)
        self.assertLess(max(gaps[1:]), 2)
        with self.assertRaises(grpc.RpcError) as cut:
            list(client.generation.Generate(long_prompt(False), timeout=120))
        self.assertNotEqual(cut.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)


class StoreTest(ClusterTest):
    """The session store, and clocks."""

    def test_a_store_that_does_not_answer_stops_only_what_needs_it(self):
        redis = Redis(self.folder)
        self.addCleanup(redis.process.stop)
        server = self.server("--session-store", redis.url)
        client = self.client(server)
        client.once(client.turn("tale", 0, 6))
        stream = client.generation.Generate(timed(client, 3000))
        next(stream)
        redis.process.send(signal.SIGSTOP)
        try:
            self.assertEqual(list(stream)[-1].WhichOneof("event"), "finished", "a running stream is not touched")
            began = time.monotonic()
            with self.assertRaises(grpc.RpcError) as refused:
                client.once(client.turn("another", 0, 6), timeout=20)
            say(f"  a turn that needs the store was refused after {time.monotonic() - began:.1f} s")
            self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertLess(time.monotonic() - began, 10)
            client.once(client.request("Once", 2))
            self.assertEqual(cluster.http_status(server.admin, "/readyz"), 200, "or all replicas would leave at once")
            wait_until(lambda: server.metrics().sum("efla_session_store_errors_total") > 0, "it is counted")
        finally:
            redis.process.send(signal.SIGCONT)
        client.generate(client.turn("tale", 1, 6))

    def test_a_replica_that_is_cut_off_from_the_store_keeps_no_session(self):
        """Its network to Redis is parted: packets vanish, nothing is refused. The other replica's is not."""
        redis = Redis(self.folder)
        self.addCleanup(redis.process.stop)
        link = Link(redis.port)
        self.addCleanup(link.close)
        cut_off = self.server("--session-store", f"redis://127.0.0.1:{link.port}", "--drain-timeout", "5", name="cut_off")
        other = self.server("--session-store", redis.url, name="other")
        here, there = self.client(cut_off), self.client(other)
        plain = [there.once(there.turn("plain", number, 6)).token_ids for number in range(5)]
        # One that rests in the store belongs to nobody; what is in no store yet has an owner, with a lease of 10 s.
        for session, durability in (("rests", "SYNC"), ("owned", "NONE")):
            here.once(here.turn(session, 0, 6))
            self.assertEqual(here.once(here.turn(session, 1, 6, durability)).token_ids, plain[1])

        stream = here.generation.Generate(timed(here, 4000))
        next(stream)
        link.cut()
        cut_at = time.monotonic()
        reply = here.once(here.turn("owned", 2, 6, durability="ASYNC"))
        self.assertEqual(reply.token_ids, plain[2])
        self.assertLess(reply.finished.session.durable_revision, reply.finished.session.revision, "and it says so")
        asked_at = time.monotonic()
        with self.assertRaises(grpc.RpcError) as refused:
            here.once(here.turn("rests", 2, 6), timeout=20)
        self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
        refused_s = time.monotonic() - asked_at
        self.assertLess(refused_s, 5)
        self.assertEqual(there.once(there.turn("rests", 2, 6)).token_ids, plain[2])
        rested_s = time.monotonic() - asked_at - refused_s
        self.assertEqual(list(stream)[-1].WhichOneof("event"), "finished", "a running stream is not touched")
        here.once(here.request("Once", 4))
        self.assertEqual(cluster.http_status(cut_off.admin, "/readyz"), 200, "or all replicas would leave at once")
        wait_until(lambda: cut_off.metrics().sum("efla_session_store_errors_total") > 0, "it is counted")

        # From its last durable revision: the turns that no store has are made again.
        self.assertEqual(there.generate(there.turn("owned", 1, 6)).token_ids, plain[1])
        taken_s = time.monotonic() - cut_at
        self.assertLess(taken_s, 30)
        self.assertGreater(other.metrics().sum("efla_session_takeovers_total"), 0)
        link.mend()
        mended_at = time.monotonic()
        # The former owner goes on from the store, not from what it had computed itself.
        for session, number in (("owned", 2), ("rests", 3)):
            self.assertEqual(self.durable_turn(here, session, number), plain[number])
            self.assertEqual(there.generate(there.turn(session, number + 1, 6)).token_ids, plain[number + 1])
        say(f"  cut off from Redis: what needs it was refused after {refused_s:.1f} s and went on elsewhere after {rested_s:.1f} s more; "
            f"what the replica owned had gone on elsewhere {taken_s:.1f} s after the cut; all was well {time.monotonic() - mended_at:.1f} "
            f"s after the mending")

    def durable_turn(self, client, session, number):
        """The tokens of a turn that the store has. Until the server has found the store again and found out what has become
        of the session, a turn is refused, or is told to be on no store."""
        end = time.monotonic() + 20
        for attempt in itertools.count():
            request = client.turn(session, number, 6)
            request.request_id += f"-{attempt}"
            try:
                reply = client.generate(request)
                if reply.finished.session.durable_revision == reply.finished.session.revision:
                    return reply.token_ids
            except grpc.RpcError as error:
                self.assertEqual(cluster.reason(error), (grpc.StatusCode.ABORTED, "SESSION_LOST"))
            self.assertLess(time.monotonic(), end, "it never gets durable")

    def test_a_full_disk_keeps_the_server_going(self):
        mount = os.path.join(self.folder, "small")
        os.makedirs(mount)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount], capture_output=True).returncode != 0:
            self.skipTest("a small file system cannot be mounted: not root")
        self.addCleanup(subprocess.run, ["umount", "-l", mount], check=True)
        server = self.server("--session-dir", os.path.join(mount, "sessions"), "--drain-timeout", "1")
        client = self.client(server)
        replies = []
        for number in range(12):  # a state is 1.4 MB
            replies.append(client.once(client.turn(f"s{number}", 0, 6)))
        stored = [reply.finished.session.durable_revision == reply.finished.session.revision for reply in replies]
        say(f"  {sum(stored)} of {len(stored)} sessions are durable on a disk of 8 MB; all went on")
        self.assertTrue(stored[0])
        self.assertFalse(stored[-1], "what is not durable says so")
        self.assertGreater(server.metrics().sum("efla_session_store_errors_total"), 0)
        again = client.once(client.turn("s11", 1, 6))
        self.assertEqual(len(again.token_ids), 6)
        self.assertEqual(cluster.http_status(server.admin, "/readyz"), 200)

    def test_a_jump_of_the_clock_changes_no_stream(self):
        """Nor does it lose a session: leases run on the owner's monotonic clock."""
        library = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
        if not os.path.exists(library):
            self.skipTest("libfaketime is not installed")
        clock = os.path.join(self.folder, "clock")
        with open(clock, "w", encoding="utf-8") as file:
            file.write("+0\n")
        redis = Redis(self.folder)
        self.addCleanup(redis.process.stop)
        faked = dict(LD_PRELOAD=library, FAKETIME_TIMESTAMP_FILE=clock, FAKETIME_DONT_FAKE_MONOTONIC="1", FAKETIME_NO_CACHE="1")
        os.environ.update(faked)
        try:
            server = self.server("--session-store", redis.url)
        finally:
            for name in faked:
                del os.environ[name]
        other = self.server("--session-store", redis.url, name="other")
        client, elsewhere = self.client(server), self.client(other)
        expected = client.once(client.request("Once upon a time", 60)).token_ids
        plain = [elsewhere.once(elsewhere.turn("plain", number, 6)).token_ids for number in range(6)]
        self.assertEqual(client.once(client.turn("tale", 0, 6)).token_ids, plain[0])
        turn = 1
        for offset in (3600, -3600):
            stream = client.generation.Generate(timed(client, 3000), timeout=20)
            next(stream)
            jumped_at = time.monotonic()
            with open(clock, "w", encoding="utf-8") as file:
                file.write(f"{offset:+d}\n")
            self.assertEqual(list(stream)[-1].WhichOneof("event"), "finished", offset)
            self.assertLess(time.monotonic() - jumped_at, 10, "the time budget is not the wall clock's")
            self.assertEqual(client.once(client.request("Once upon a time", 60)).token_ids, expected)
            step = server.metrics().sum("efla_engine_last_step_timestamp_seconds")
            self.assertLess(abs(step - time.time() - offset), 60, "its clock has jumped")
            self.assertEqual(cluster.http_status(server.admin, "/livez"), 200)
            with self.assertRaises(grpc.RpcError) as late:  # a deadline passes when it should
                client.once(client.request("Once", 1_000_000), timeout=0.5)
            self.assertEqual(late.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            self.assertEqual(client.once(client.turn("tale", turn, 6)).token_ids, plain[turn])
            self.assertEqual(elsewhere.generate(elsewhere.turn("tale", turn + 1, 6)).token_ids, plain[turn + 1])
            turn += 2
        self.assertEqual(client.generate(client.turn("tale", turn, 6)).token_ids, plain[turn])
        seconds = self.lease_age(redis)
        say(f"  jumps of an hour, forward and back: streams, deadlines and {turn + 1} turns as ever; leases have {seconds} s to live")
        self.assertTrue(all(0 < left <= 10 for left in seconds), seconds)

    def lease_age(self, redis):
        """Seconds to live of all leases."""
        def ask(*words):
            return subprocess.run(["redis-cli", "-p", str(redis.port), *words], check=True, capture_output=True,
                                  text=True).stdout.split()
        return [int(ask("pttl", key)[0]) / 1000 for key in ask("--scan", "--pattern", "*lease:*")]


class CertificatesTest(ClusterTest):
    def certificate(self, name):
        """Text of a certificate that signs itself, and of its key."""
        path = os.path.join(self.folder, name)
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", path + ".key", "-out", path + ".crt",
                        "-days", "30", "-subj", "/CN=" + name, "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
                       check=True, capture_output=True)
        return [open(path + ending, encoding="ascii").read() for ending in (".crt", ".key")]

    def put(self, **texts):
        """Each file in the place of the one before, at once."""
        for name, text in texts.items():
            path = os.path.join(self.folder, "served." + name)
            with open(path + ".new", "w", encoding="ascii") as file:
                file.write(text)
            os.rename(path + ".new", path)

    def test_certificates_are_replaced_under_load(self):
        (old, old_key), (new, new_key) = self.certificate("old"), self.certificate("new")
        self.put(crt=old, key=old_key)
        served = os.path.join(self.folder, "served")
        servers = [self.server("--tls-cert", served + ".crt", "--tls-key", served + ".key", "--session-dir",
                               os.path.join(self.folder, f"sessions-{i}"), name=f"r{i}") for i in (1, 2)]
        both = {"credentials": grpc.ssl_channel_credentials((old + new).encode()),
                "options": [("grpc.lb_policy_name", "round_robin"), ("grpc.ssl_target_name_override", "localhost")]}
        # Some make connections all the time, whose handshakes meet the certificate of the moment; the others keep theirs.
        everywhere = "ipv4:" + ",".join(server.address for server in servers)
        loads = [self.load(everywhere, callers=4, reconnect=reconnect, **both) for reconnect in (True, False)]
        loads += [self.load(server.address, callers=0, sessions=[f"{server.name}-tale"], **both) for server in servers]
        client = self.client(servers[0], **both)
        stream = client.generation.Generate(timed(client, 8000))
        next(stream)

        def shown():
            return [ssl.get_server_certificate(("127.0.0.1", server.grpc_port)) for server in servers]

        def reloads(result):
            return [server.metrics().sum("efla_tls_reloads_total", result=result) for server in servers]
        time.sleep(1.5)
        self.assertEqual(shown(), [old, old])
        began = time.monotonic()
        self.put(crt=new)  # for a moment there is a key that is not this certificate's
        wait_until(lambda: min(reloads("failed")) >= 1, "a pair that does not match is refused")
        self.assertEqual(shown(), [old, old])
        self.put(key=new_key)
        wait_until(lambda: shown() == [new, new], "new connections get the new certificate")
        rotated_s = time.monotonic() - began
        time.sleep(1.5)
        for broken in ({"crt": "no certificate"}, {"crt": old}):
            failed = reloads("failed")
            self.put(**broken)
            wait_until(lambda: all(now > was for now, was in zip(reloads("failed"), failed)), "it is refused")
            self.assertEqual(shown(), [new, new])
        self.put(crt=new)
        time.sleep(1)
        self.assertEqual(shown(), [new, new])
        # An old connection's calls run on, whatever is shown to others by now.
        self.assertEqual(list(stream)[-1].WhichOneof("event"), "finished")
        for load in loads:
            load.stop()
        say(f"  both servers showed the new certificate {rotated_s:.1f} s after its first file; {loads[0].calls} calls on "
            f"connections of their own, {loads[1].calls} on old ones and {sum(sum(load.turns.values()) for load in loads)} turns "
            f"meanwhile; tried again: {dict(sum((load.retried for load in loads), collections.Counter()))}")
        self.assertEqual([failure for load in loads for failure in load.failures], [])
        self.assertTrue(all(turns > 0 for load in loads[2:] for turns in load.turns.values()))
        self.assertGreater(min(load.calls for load in loads[:2]), 20)


class PingsTest(ClusterTest):
    def test_pings_every_ten_seconds_are_welcome_and_many_are_not(self):
        """The contract is one in 10 s; the server permits one in 9 s, since timers are not exact. It takes three that come
        too soon to be cut off, so this takes three intervals; with --long more than a minute, of a gRPC client too."""
        server = self.server("--keepalive-time", "600")
        number, interval = (8, 10) if cluster.LONG else (4, 9.3)
        connections = {"idle": Pinger(server.grpc_port, interval, number), "hasty": Pinger(server.grpc_port, 1, 10)}
        client = self.client(server, options=[("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_permit_without_calls", 1),
                                              ("grpc.http2.max_pings_without_data", 0)])
        states = []
        client.once(client.request("Once", 1))
        client.channel.subscribe(states.append)
        for pinger in connections.values():
            pinger.thread.join()
        self.assertIsNone(connections["idle"].goaway)
        self.assertEqual(connections["idle"].answered, number)
        code, words = connections["hasty"].goaway
        self.assertEqual((code, words), (11, b"too_many_pings"))  # ENHANCE_YOUR_CALM
        client.once(client.request("Once", 1))
        self.assertLessEqual(set(states), {grpc.ChannelConnectivity.READY})
        say(f"  {number} pings, one in {interval} s, were answered; of ten, one a second, {connections['hasty'].answered} were, then "
            f"too_many_pings")


class Http2:
    """The frames of a connection of bare HTTP/2."""

    DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
    END_STREAM, END_HEADERS, ACK = 1, 4, 1
    INITIAL_WINDOW_SIZE = 4

    def __init__(self, port, settings=b""):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.frame(self.SETTINGS, 0, settings))

    @staticmethod
    def frame(kind, flags, payload, stream=0):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    def read_frame(self):
        """Kind, flags, payload."""
        head = self.read(9)
        return head[3], head[4], self.read(int.from_bytes(head[:3], "big"))

    def read(self, size):
        data = b""
        while len(data) < size:
            some = self.socket.recv(size - len(data))
            if not some:
                raise ConnectionError("closed")
            data += some
        return data


class DeafClient(Http2):
    """A client whose window is closed: its calls are made, and nothing of the answers can be sent."""

    def __init__(self, port):
        super().__init__(port, struct.pack(">HI", self.INITIAL_WINDOW_SIZE, 0))
        self.streams = itertools.count(1, 2)
        threading.Thread(target=self.run, daemon=True).start()

    def generate(self, request):
        fields = ((":method", "POST"), (":scheme", "http"), (":path", "/efla.v1.Generation/Generate"), (":authority", "localhost"),
                  ("content-type", "application/grpc"), ("te", "trailers"))
        # Literal fields that stay out of the table (RFC 7541, 6.2.2), shorter than 127 bytes each.
        block = b"".join(bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields)
        message, stream = request.SerializeToString(), next(self.streams)
        self.socket.sendall(self.frame(self.HEADERS, self.END_HEADERS, block, stream) +
                            self.frame(self.DATA, self.END_STREAM, struct.pack(">BI", 0, len(message)) + message, stream))

    def run(self):
        try:
            while True:
                kind, flags, payload = self.read_frame()
                if kind in (self.SETTINGS, self.PING) and not flags & self.ACK:
                    self.socket.sendall(self.frame(kind, self.ACK, payload if kind == self.PING else b""))
        except OSError:
            self.socket.close()


class Pinger(Http2):
    """A client that does nothing but ping."""

    def __init__(self, port, interval_s, number):
        super().__init__(port)
        self.interval_s, self.number = interval_s, number
        self.answered, self.goaway = 0, None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with self.socket:
            for number in range(self.number):
                if number > 0:
                    time.sleep(self.interval_s)
                try:
                    self.socket.sendall(self.frame(self.PING, 0, struct.pack(">Q", number)))
                    self.await_answer(number)
                except OSError:
                    return
                if self.goaway:
                    return

    def await_answer(self, number):
        while True:
            kind, flags, payload = self.read_frame()
            if kind == self.SETTINGS and not flags & self.ACK:
                self.socket.sendall(self.frame(self.SETTINGS, self.ACK, b""))
            elif kind == self.PING and not flags & self.ACK:  # of the server's own
                self.socket.sendall(self.frame(self.PING, self.ACK, payload))
            elif kind == self.PING and payload == struct.pack(">Q", number):
                self.answered += 1
                return
            elif kind == self.GOAWAY:
                self.goaway = int.from_bytes(payload[4:8], "big"), payload[8:]
                return


if __name__ == "__main__":
    cluster.main()
