"""Mixed load for half a minute or for an hour: no error, memory flat, metrics that agree with the clients' own books.

usage: soak_test.py [--seconds N | --long] [unittest arguments]       (--long is an hour)
"""
import os
import statistics
import time

import cluster
from cluster import ClusterTest, say, wait_until
from mixed_load import Actor, MixedLoad

SECONDS = float(cluster.take_value("--seconds", 3600 if cluster.LONG else 24))
# Slots, buffers and threads' heaps have been used by then.
WARM_ACTIONS = 300
# Memory moves by what is in flight: the clients' turns and snapshots hold some states of 1.4 MB each at a time. Means over
# seconds feel that, those over minutes do not, and there a call may leave 50 bytes behind at most.
MOST_GROWTH_BYTES = (4 if SECONDS >= 1200 else 8) << 20
MIB = 1 << 20


class SoakTest(ClusterTest):
    def test_mixed_load_leaves_memory_flat_and_counts_true(self):
        server = self.server("--session-dir", os.path.join(self.folder, "sessions"), "--session-host-bytes", "16MiB",
                             "--max-queue", "24")
        before = server.metrics()
        load = MixedLoad(server, self.stubs)
        self.addCleanup(load.stopping.set)
        books = load.books
        began, samples, warm_at = time.monotonic(), [], None  # [(seconds, bytes, file descriptors)]
        while not books.failures:
            time.sleep(max(0.2, SECONDS / 200))
            scrape = server.metrics()
            at = time.monotonic() - began
            samples.append((at, scrape.sum("process_resident_memory_bytes"), scrape.sum("process_open_fds")))
            if SECONDS >= 600 and len(samples) % 20 == 0:
                say(f"  {at:.0f} s: {samples[-1][1] / MIB:.1f} MiB, {sum(books.actions.values())} actions")
            if warm_at is None and at >= SECONDS / 6 and sum(books.actions.values()) >= WARM_ACTIONS:
                warm_at = at
            if warm_at is not None and at > SECONDS and at > warm_at + SECONDS / 2:
                break
        load.stop()
        self.assertEqual(books.failures, [])
        for name in ("efla_requests_running", "efla_requests_waiting", "efla_sessions", "efla_session_turns_active",
                     "efla_session_contexts", "efla_session_host_bytes"):
            wait_until(lambda: server.metrics().sum(name) == 0, f"{name} is 0")
        wait_until(lambda: server.metrics().sum("process_open_fds") <= before.sum("process_open_fds"), "connections are closed")
        after = server.metrics()
        calls = sum(books.calls.values()) + books.deadlines + books.unseen
        say(f"\n  {calls} calls, {books.tokens + books.cut_tokens} tokens read in {samples[-1][0]:.0f} s: {dict(books.actions)}")
        say(f"  {self.by_code(books)}; {books.deadlines} deadlines passed after an answer, {books.unseen} before any")
        self.assertEqual(books.differences(before, after), [])
        self.assertEqual(set(books.actions), set(Actor.ACTIONS))
        self.assertEqual(after.sum("efla_session_store_errors_total"), 0)
        self.assertEqual(after.sum("efla_state_slots", kind="free") + after.sum("efla_prefix_cache_slots"),
                         after.sum("efla_state_slots", kind="total"))
        self.check_memory(samples, warm_at)

    def check_memory(self, samples, warm_at):
        steady = [sample for sample in samples if sample[0] >= warm_at]
        halves = steady[:len(steady) // 2], steady[len(steady) // 2:]
        means = [statistics.mean(memory for _, memory, _ in half) for half in halves]
        points = [samples[round(i * (len(samples) - 1) / 12)] for i in range(13)]
        say("  MiB at seconds: " + ", ".join(f"{memory / MIB:.1f} at {at:.0f}" for at, memory, _ in points))
        say(f"  memory from {warm_at:.0f} s on: {means[0] / MIB:.2f} MiB in the first half, {means[1] / MIB:.2f} MiB in the second; "
            f"{steady[0][2]:.0f} to {steady[-1][2]:.0f} file descriptors")
        self.assertLess(means[1] - means[0], MOST_GROWTH_BYTES)
        descriptors = [statistics.mean(number for _, _, number in half) for half in halves]
        self.assertLess(descriptors[1] - descriptors[0], 4)

    @staticmethod
    def by_code(books):
        codes = {}
        for (_, code), number in books.calls.items():
            codes[code] = codes.get(code, 0) + number
        return codes


if __name__ == "__main__":
    cluster.main()
