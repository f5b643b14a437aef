"""deploy/nginx.conf and deploy/haproxy.cfg in front of two real replicas with one Redis.

usage: balancers_test.py [--long] [unittest arguments]
"""
import signal
import threading
import time

import grpc

import cluster
from cluster import ClusterTest, Haproxy, Nginx, Redis, say, wait_until

SESSIONS = [f"tale-{i}" for i in range(4)]
CUT = 250  # tokens of a stream that outlasts the drain delay


class Balanced:
    """The cases, for each balancer."""

    DRAIN_DELAY = "2"

    def start_balancer(self):
        raise NotImplementedError

    def setUp(self):
        super().setUp()
        self.redis = Redis(self.folder)
        self.addCleanup(self.redis.process.stop)
        flags = ["--session-store", self.redis.url, "--drain-delay", self.DRAIN_DELAY, "--drain-timeout", "20"]
        self.replicas = [self.server(*flags, name=f"r{i}") for i in (1, 2)]
        self.balancer = self.start_balancer()
        self.addCleanup(self.balancer.stop)

    def calls_of(self, replica):
        return replica.metrics().sum("efla_grpc_calls_started_total", method="Generate")

    def expected_tokens(self, turns, turn_tokens=12):
        """What a session draws in so many turns on a server that nothing happens to."""
        reference = self.server("--session-dir", f"{self.folder}/reference", name="reference")
        client = self.client(reference)
        tokens = []
        for number in range(turns):
            tokens += client.once(client.turn("reference", number, turn_tokens)).token_ids
        return tokens

    def check_sessions(self, load):
        expected = self.expected_tokens(max(load.turns.values()))
        for name in SESSIONS:
            self.assertEqual(load.tokens[name], expected[:len(load.tokens[name])], name)
            self.assertEqual(len(load.tokens[name]), 12 * load.turns[name], name)

    def test_a_session_stays_with_its_replica_and_others_spread(self):
        client = self.client(self.balancer)
        for number in range(16):
            before = [self.calls_of(replica) for replica in self.replicas]
            for turn in range(3):
                client.once(client.turn(f"s{number}", turn, tokens=2))
            grown = [self.calls_of(replica) - was for replica, was in zip(self.replicas, before)]
            self.assertEqual(sorted(grown), [0, 3], f"session s{number} went to {grown}")
        self.assertTrue(all(self.calls_of(replica) > 0 for replica in self.replicas))
        takeovers = sum(r.metrics().sum("efla_session_takeovers_total") for r in self.replicas)
        self.assertEqual(takeovers, 0)
        before = [self.calls_of(replica) for replica in self.replicas]
        for _ in range(24):
            client.once(client.request("Once", 1))
        grown = [self.calls_of(replica) - was for replica, was in zip(self.replicas, before)]
        self.assertEqual(sum(grown), 24)
        self.assertGreater(min(grown), 2, "calls without a session go to both")

    def test_a_rolling_restart_fails_no_call_and_loses_no_session(self):
        load = self.load(self.balancer.address, callers=3, sessions=SESSIONS)
        time.sleep(1)
        for replica in self.replicas:
            turns = dict(load.turns)
            began = time.monotonic()
            replica.process.send(signal.SIGTERM)
            wait_until(lambda: http_gone(replica), "readiness is gone at once", 2)
            self.assertEqual(replica.process.wait(), 0, replica.process.text()[-3000:])
            say(f"  {replica.name} drained in {time.monotonic() - began:.1f} s")
            replica.start()
            self.settle(replica)
            wait_until(lambda: all(load.turns[name] > turns.get(name, 0) for name in SESSIONS), "all sessions go on")
        time.sleep(1)
        load.stop()
        say(f"  {load.calls} calls, {sum(load.turns.values())} turns, {len(load.failures)} failed; "
            f"tried again: {dict(load.retried)}")
        self.assertEqual(load.failures, [])
        self.assertGreater(load.calls, 20)
        self.check_sessions(load)
        sinks = [replica.metrics().sum("efla_grpc_calls_started_total", method="Generate")
                 for replica in self.replicas]
        self.assertTrue(all(count > 0 for count in sinks), f"both replicas work again: {sinks}")

    def settle(self, replica):
        """Until the balancer sends calls to a replica that came back."""
        before = self.calls_of(replica)
        wait_until(lambda: self.calls_of(replica) > before, f"{replica.name} gets calls again")

    def test_a_running_stream_outlives_its_replicas_drain(self):
        client = self.client(self.balancer)
        first = threading.Event()
        result = []

        def stream():
            request = client.request("Once", 1_000_000)
            request.time_budget_ms = 4000
            try:
                result.append(client.once(request, on_event=lambda event: first.set()))
            except grpc.RpcError as error:
                result.append(error)
                first.set()
        thread = threading.Thread(target=stream, daemon=True)
        thread.start()
        self.assertTrue(first.wait(10))
        busy = max(self.replicas, key=lambda replica: replica.metrics().sum("efla_requests_running"))
        busy.process.send(signal.SIGTERM)
        wait_until(lambda: http_gone(busy), "readiness is gone", 2)
        self.assertEqual(cluster.http_status(busy.admin, "/lbz"), 404)
        self.assertEqual(cluster.http_status(busy.admin, "/livez"), 200)
        thread.join(30)
        self.assertNotIsInstance(result[0], grpc.RpcError, result[0])
        self.assertGreater(len(result[0].token_ids), 100)
        self.assertEqual(busy.process.wait(), 0)
        client.generate(client.request("Once", 1))  # the other one answers
        busy.start()

    def test_a_killed_replicas_sessions_go_on_elsewhere(self):
        load = self.load(self.balancer.address, callers=2, sessions=SESSIONS)
        time.sleep(1)
        turns = dict(load.turns)
        killed_at = time.monotonic()
        self.replicas[0].process.send(signal.SIGKILL)
        self.replicas[0].process.wait()
        wait_until(lambda: all(load.turns[name] > turns.get(name, 0) + 1 for name in SESSIONS), "all sessions go on", 40)
        say(f"  all sessions had gone on {time.monotonic() - killed_at:.1f} s after kill -9")
        self.replicas[0].start()
        load.stop()
        say(f"  {load.calls} calls, {sum(load.turns.values())} turns; tried again: {dict(load.retried)}")
        # A call without a session that had begun cannot be told from one that has had an effect: its client sees
        # the break.
        broken = [failure for failure in load.failures if "caller" not in failure]
        self.assertEqual(broken, [])
        self.assertLessEqual(len(load.failures), 2, load.failures)  # at most what ran there
        self.check_sessions(load)

    def test_the_balancers_own_reload_cuts_nothing(self):
        load = self.load(self.balancer.address, callers=2, sessions=SESSIONS[:2])
        for _ in range(3):
            time.sleep(0.5)
            self.balancer.reload()
        time.sleep(1)
        load.stop()
        self.assertEqual(load.failures, [])

    def test_no_replica_is_told_as_unavailable_with_a_pushback(self):
        for replica in self.replicas:
            self.assertEqual(replica.stop(), 0)
        client = self.client(self.balancer)
        with self.assertRaises(grpc.RpcError) as refused:
            client.once(client.request("Once", 1))
        self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertIn("no replica answers", refused.exception.details())
        for replica in self.replicas:
            replica.start()
        client.generate(client.request("Once", 1))


def http_gone(replica):
    return cluster.http_status(replica.admin, "/readyz") != 200


class NginxTest(Balanced, ClusterTest):
    DRAIN_DELAY = "0"

    def start_balancer(self):
        return Nginx(self.folder, self.replicas)


class HaproxyTest(Balanced, ClusterTest):
    def start_balancer(self):
        return Haproxy(self.folder, self.replicas)

    def test_a_draining_replica_is_left_before_it_refuses(self):
        self.replicas[0].process.send(signal.SIGTERM)
        wait_until(lambda: self.balancer.states()[0] in ("NOLB", "DRAIN"), "HAProxy leaves it", 2)
        self.assertTrue(self.replicas[0].process.running())
        self.assertTrue(cluster.accepts(self.replicas[0].grpc_port), "its port is open still")
        self.replicas[0].process.wait()
        wait_until(lambda: self.balancer.states()[0] == "DOWN", "HAProxy finds it dead", 5)
        self.replicas[0].start()
        wait_until(lambda: self.balancer.states()[0] == "UP", "HAProxy takes it back", 5)

    def test_a_frozen_replicas_streams_end_soon(self):
        client = self.client(self.balancer)
        first, ended = threading.Event(), []

        def stream():
            try:
                client.once(client.request("Once", 1_000_000), timeout=30, on_event=lambda event: first.set())
            except grpc.RpcError as error:
                ended.append((time.monotonic(), error.code()))
        thread = threading.Thread(target=stream, daemon=True)
        thread.start()
        self.assertTrue(first.wait(10))
        busy = max(self.replicas, key=lambda replica: replica.metrics().sum("efla_requests_running"))
        frozen_at = time.monotonic()
        busy.process.send(signal.SIGSTOP)
        thread.join(30)
        busy.process.send(signal.SIGCONT)
        seconds = ended[0][0] - frozen_at
        say(f"  the stream of a frozen replica ended after {seconds:.1f} s with {ended[0][1].name}")
        self.assertLess(seconds, 5)
        self.assertNotEqual(ended[0][1], grpc.StatusCode.DEADLINE_EXCEEDED)


if __name__ == "__main__":
    cluster.main()
