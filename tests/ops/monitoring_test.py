"""Metrics, rules, dashboards, consoles and the server's own page: against a real server, scraped by a real Prometheus.

usage: monitoring_test.py [--long] [--screenshots FOLDER] [unittest arguments]
"""
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

import cluster
from browser import Browser
from cluster import Client, ClusterTest, Load, Process, Replica, free_port, http_text, wait_until

DEPLOY = os.path.join(cluster.SOURCE_DIR, "deploy")
RULES = os.path.join(DEPLOY, "prometheus")
SCREENSHOTS = cluster.take_value("--screenshots")

spec = importlib.util.spec_from_file_location("make", os.path.join(DEPLOY, "dashboards", "make.py"))
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def promtool(*arguments, text=None):
    return subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True)


class RulesTest(unittest.TestCase):
    def test_rules_and_configuration_are_well_formed(self):
        for arguments in (("check", "rules", os.path.join(RULES, "alerts.yml"), os.path.join(RULES, "recording.yml")),
                          ("check", "config", os.path.join(RULES, "prometheus.yml"))):
            result = promtool(*arguments)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_alerts_fire_on_what_they_are_for(self):
        for tests in ("alerts_test.yml", "stall_test.yml"):
            result = promtool("test", "rules", os.path.join(RULES, "tests", tests))
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_every_alert_is_tested_and_has_a_place_in_the_runbook(self):
        alerts = open(os.path.join(RULES, "alerts.yml"), encoding="utf-8").read()
        tests = open(os.path.join(RULES, "tests", "alerts_test.yml"), encoding="utf-8").read()
        runbook = open(os.path.join(DEPLOY, "RUNBOOK.md"), encoding="utf-8").read()
        anchors = {re.sub(r"[^\w -]", "", line.lstrip("# ").strip()).lower().replace(" ", "-")
                   for line in runbook.splitlines() if line.startswith("#")}
        names = re.findall(r"- alert: (\w+)", alerts)
        self.assertGreater(len(names), 15)
        for name in names:
            self.assertIn(name, tests)
        links = re.findall(r"runbook_url: '(.*)#([\w-]+)'\n", alerts)
        self.assertEqual(len(links), len(names))
        self.assertEqual(len({base for base, _ in links}), 1, "the operator names the runbook's place once")
        for _, anchor in links:
            self.assertIn(anchor, anchors)

    def test_rules_use_metrics_that_exist_as_what_they_are(self):
        table = make.load_table()
        import yaml
        for name in ("recording.yml", "alerts.yml"):
            with open(os.path.join(RULES, name), encoding="utf-8") as file:
                groups = yaml.safe_load(file)["groups"]
            for rule in (rule for group in groups for rule in group["rules"]):
                self.assertEqual(make.findings(rule["expr"], table), [], rule)


class DashboardsTest(unittest.TestCase):
    def test_the_files_are_what_make_makes_and_expressions_fit_the_metrics(self):
        result = subprocess.run([sys.executable, os.path.join(DEPLOY, "dashboards", "make.py"), "--check"],
                                capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_the_check_finds_what_it_is_to_find(self):
        table = make.load_table()
        for expression in ("efla_no_such_metric", "efla_requests_total", "rate(efla_requests_running[5m])",
                           "efla_step_seconds", "sum(rate(efla_requests_total{colour=\"red\"}[5m]))",
                           "histogram_quantile(0.9, rate(efla_step_seconds_sum[5m]))"):
            self.assertNotEqual(make.findings(expression, table), [], expression)
        self.assertEqual(make.findings("sum(rate(efla_requests_total{outcome=\"stop\"}[5m]))", table), [])

    def test_panels_do_not_overlap_and_ids_are_their_own(self):
        for name, text in make.files().items():
            dashboard = json.loads(text)
            taken = {}
            for panel in dashboard["panels"]:
                place = panel["gridPos"]
                self.assertLessEqual(place["x"] + place["w"], 24)
                for x in range(place["x"], place["x"] + place["w"]):
                    for y in range(place["y"], place["y"] + place["h"]):
                        self.assertNotIn((x, y), taken, f"{name}: {panel['title']} lies on {taken.get((x, y))}")
                        taken[x, y] = panel["title"]
            ids = [panel["id"] for panel in dashboard["panels"]]
            self.assertEqual(len(ids), len(set(ids)))


class Prometheus:
    def __init__(self, folder, targets):
        self.port = free_port()
        with open(os.path.join(RULES, "prometheus.yml"), encoding="utf-8") as file:
            text = file.read()
        targets = ", ".join(targets)
        text = text.replace("[replica-1:9090, replica-2:9090]", f"[{targets}]")
        text = text.replace("15s", "1s")
        for line in ("external_labels:", "  efla_runbook: https://git.example.com/efla/deploy/RUNBOOK.md"):
            assert f"  # {line}\n" in text
            text = text.replace(f"  # {line}\n", f"  {line}\n")
        text = text.replace("  - recording.yml", f"  - {RULES}/recording.yml").replace("  - alerts.yml", f"  - {RULES}/alerts.yml")
        path = os.path.join(folder, "prometheus.yml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        self.process = Process(
            ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder}/tsdb",
             f"--web.listen-address=127.0.0.1:{self.port}", f"--web.console.templates={RULES}/consoles",
             f"--web.console.libraries={folder}"], os.path.join(folder, "prometheus.log"))
        wait_until(lambda: cluster.http_status(f"127.0.0.1:{self.port}", "/-/ready") == 200, "Prometheus is ready")

    def query(self, expression):
        query = urllib.parse.urlencode({"query": expression})
        try:
            return json.loads(http_text(f"127.0.0.1:{self.port}", "/api/v1/query?" + query))["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error


class MonitoredServerTest(ClusterTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = Replica("r1", cls.scratch.path, "--admin-generate", "--session-dir", os.path.join(cls.scratch.path, "sessions"))
        # Series of tenants and certificates are there where these are.
        pem = os.path.join(cls.scratch.path, "pem")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", pem + ".key", "-out", pem + ".crt", "-days", "30",
                        "-subj", "/CN=localhost"], check=True, capture_output=True)
        cls.secured = Replica("secured", cls.scratch.path, "--auth-file", os.path.join(DEPLOY, "auth.example.json"), "--tls-cert", pem + ".crt",
                              "--tls-key", pem + ".key", "--tls-client-ca", pem + ".crt")
        cls.prometheus = Prometheus(cls.scratch.path, [cls.server.admin, cls.secured.admin])
        # All label values of what may happen, some of each.
        load = Load(cls.server.address, cls.stubs, callers=2, sessions=["one", "two"])
        time.sleep(6)
        cls.load = load

    @classmethod
    def tearDownClass(cls):
        cls.load.stop()
        cls.prometheus.process.stop()
        for server in (cls.server, cls.secured):
            assert server.stop() == 0, server.process.text()[-2000:]
        assert cls.load.failures == [], cls.load.failures

    def test_the_page_passes_prometheus_own_lint(self):
        result = promtool("check", "metrics", text=self.server.metrics().text)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_the_table_of_metrics_is_the_servers(self):
        found = make.read_metrics(self.secured.metrics().text)
        self.assertLessEqual(set(make.read_metrics(self.server.metrics().text)), set(found))
        table = make.load_table()
        self.assertEqual(sorted(found), sorted(table), "run: curl ADMIN/metrics | deploy/dashboards/make.py --metrics -")
        for name, row in table.items():
            self.assertEqual(found[name]["type"], row["type"], name)
            self.assertEqual(found[name]["labels"], row["labels"], name)
            self.assertEqual(found[name]["help"], row["help"], name)

    def test_the_build_is_the_programs_build_id(self):
        """In the metrics and in --version, and the same of a program without its symbols, as it is installed."""
        program = os.path.join(cluster.BIN_DIR, "efla_server")
        notes = subprocess.run(["readelf", "--notes", program], capture_output=True, text=True, check=True).stdout
        build = re.search(r"Build ID: ([0-9a-f]+)", notes)[1][:16]
        [(labels, value)] = self.server.metrics().series["efla_build_info"]
        self.assertEqual((labels["build"], value), (build, 1))
        stripped = os.path.join(self.scratch.path, "efla_server")
        subprocess.run(["strip", "-o", stripped, program], check=True)
        for path in (program, stripped):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            self.assertEqual(said, f"efla_server {labels['version']} (build {build})\n")

    def test_labels_are_few_and_series_do_not_grow_with_what_clients_send(self):
        before = self.server.metrics()
        count = sum(len(series) for series in before.series.values())
        self.assertLess(count, 5000)
        for name in ("efla_requests_waiting", "efla_requests_running", "efla_state_pool_usage_ratio"):
            self.assertEqual(len(before.series[name]), 1, f"endpoint pickers read one series of {name}")
        client = Client(self.server.address, self.stubs)
        for number in range(30):
            request = client.request("Once", 1, request_id=f"id-{number}")
            client.once(request)
            request.model = f"no-such-model-{number}"
            with self.assertRaises(Exception):
                client.once(request)
        client.close()
        after = self.server.metrics()
        self.assertEqual(sum(len(series) for series in after.series.values()), count)
        self.assertNotIn("no-such-model", after.text)

    def test_every_dashboard_expression_has_an_answer(self):
        def concrete(expression):
            return (expression.replace("$__rate_interval", "20s").replace("$model", ".*").replace("$instance", ".*"))
        # Comparisons that hold for nothing now, and ratios of recorded rules that need hours, may be empty; of all others
        # two scrapes are enough.
        silent = [(name, title, expression) for name, title, expression in make.expressions()
                  if "efla:" not in expression and " > 0" not in expression]

        def answered():
            silent[:] = [each for each in silent if not self.prometheus.query(concrete(each[2]))]
            return not silent
        wait_until(answered, silent)

    def test_rules_are_evaluated_without_error(self):
        rules = json.loads(http_text(f"127.0.0.1:{self.prometheus.port}", "/api/v1/rules"))["data"]["groups"]
        wait_until(lambda: self.prometheus.query("efla:generation_tokens:rate5m"), "recorded")
        self.assertGreater(len(rules), 3)
        for rule in (rule for group in rules for rule in group["rules"]):
            self.assertNotEqual(rule["health"], "err", rule)
        firing = {alert["labels"]["alertname"] for alert in self.prometheus.query("ALERTS{alertstate='firing'}") or []
                  if "labels" in alert}
        self.assertLessEqual(firing, {"EflaWatchdog"})

    def test_alerts_name_the_runbook_where_the_operator_keeps_it(self):
        def alerts():
            return json.loads(http_text(f"127.0.0.1:{self.prometheus.port}", "/api/v1/alerts"))["data"]["alerts"]
        wait_until(lambda: any(alert["labels"]["alertname"] == "EflaWatchdog" for alert in alerts()), "the watchdog fires")
        urls = {alert["annotations"]["runbook_url"] for alert in alerts() if alert["labels"]["alertname"] == "EflaWatchdog"}
        self.assertEqual(urls, {"https://git.example.com/efla/deploy/RUNBOOK.md#eflawatchdog"})

    def test_the_console_page_shows_the_replica(self):
        page = http_text(f"127.0.0.1:{self.prometheus.port}", "/consoles/efla.html")
        self.assertIn(f"<td>{self.server.admin}</td><td>ready</td>", page.replace("\n", ""))
        self.assertNotIn("error", page.split("<script>")[0].lower())

    def test_the_servers_page_is_whole_and_needs_nothing_from_elsewhere(self):
        page = http_text(self.server.admin, "/")
        self.assertIn("<!doctype html>", page)
        self.assertEqual(re.findall(r'(?:src|href)="(?!/|data:)[^"]*"', page), [])
        self.assertNotIn("http://", page.replace("http://www.w3.org/2000/svg", ""))
        self.assertNotIn("https://", page)
        table = make.load_table()
        for name in set(re.findall(r'"(efla_\w+)"', page)) - {"efla_server"}:
            self.assertIn(re.sub(r"_(count|sum)$", "", name) if name not in table else name, table)

    def test_a_completion_streams_from_the_page(self):
        body = json.dumps({"prompt": "Once upon a time there was a", "max_tokens": 24, "temperature": 0}).encode()
        events = self.post(body)
        text = "".join(event.get("text", "") for event in events)
        client = Client(self.server.address, self.stubs)
        request = client.request("Once upon a time there was a", 24)
        wanted = "".join(getattr(event, event.WhichOneof("event")).text for event in client.generation.Generate(request)
                         if event.WhichOneof("event") in ("delta", "finished"))
        client.close()
        self.assertEqual(text, wanted)
        self.assertEqual(events[-1]["completion_tokens"], 24)
        self.assertEqual(events[-1]["finish_reason"], "max_tokens")

    def post(self, body, **headers):
        headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
        request = urllib.request.Request(f"http://{self.server.admin}/v1/generate", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as reply:
            return [json.loads(line[len("data: "):]) for line in reply.read().decode().split("\n\n") if line]

    def test_the_pages_completions_are_not_for_other_pages(self):
        good = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
        for code, body, headers in ((415, good, {"Content_Type": "text/plain"}), (403, good, {"Host": "evil.example:80"}),
                                    (400, b"no json", {}), (400, b'{"prompt": 1}', {}), (400, b'{"max_tokens": 1}', {}),
                                    (400, b'{"prompt": "a", "max_tokens": 0}', {}), (400, b'{"prompt": "a", "x": 0}', {}),
                                    (400, b'{"prompt": "a", "temperature": 3}', {}),
                                    (400, b'{"x":' + b"[" * 1000 + b"]" * 1000 + b"}", {})):
            with self.assertRaises(urllib.error.HTTPError) as refused:
                self.post(body, **headers)
            self.assertEqual(refused.exception.code, code, body)
        self.assertEqual(cluster.http_status(self.server.admin, "/v1/generate"), 405)
        self.assertEqual(cluster.http_status(self.server.admin, "/readyz"), 200)

    def test_the_pages_in_a_browser(self):
        """Charts have lines, no script fails, nothing is loaded from elsewhere, and the box streams a completion."""
        browser = Browser(os.path.join(self.scratch.path, "chromium"), height=860)
        self.addCleanup(browser.close)
        points = "[...document.querySelectorAll('svg path')].map(path => path.getAttribute('d').split('L').length)"
        browser.open(f"http://{self.server.admin}/")
        browser.look(6 if SCREENSHOTS is None else 60)
        self.assertEqual(browser.value("document.getElementById('state').textContent"), "ready")
        self.assertIn("efla", browser.value("document.getElementById('facts').textContent"))
        lines = browser.value(points)
        self.assertEqual(len(lines), 14)
        self.assertGreaterEqual(sorted(lines)[2], 3, f"points of each line: {lines}")
        self.assertGreater(browser.value("document.getElementById('generate').offsetHeight"), 0)
        browser.value("document.getElementById('go').click()")
        wait_until(lambda: browser.value("document.getElementById('note').textContent") != "", "the completion ends")
        self.assertIn("120 tokens", browser.value("document.getElementById('note').textContent"))
        self.assertGreater(browser.value("document.getElementById('out').textContent.length"), 100)
        if SCREENSHOTS:
            browser.screenshot(os.path.join(SCREENSHOTS, "admin_page.png"))
        self.assertEqual(browser.errors, [])

        browser.open(f"http://{self.secured.admin}/")  # without --admin-generate
        browser.look(3)
        self.assertEqual(browser.value("document.getElementById('state').textContent"), "ready")
        self.assertEqual(browser.value("document.getElementById('generate').offsetHeight"), 0)
        self.assertEqual(browser.errors, [])

        browser.open(f"http://127.0.0.1:{self.prometheus.port}/consoles/efla.html")
        lines = []

        def drawn():
            browser.look(1)
            lines[:] = browser.value(points)
            cards = browser.value("document.querySelectorAll('.card h2').length")
            return cards == 6 and len(lines) >= 9 and sorted(lines)[2] >= 2
        # A point is ten seconds, and so is the time between two drawings.
        wait_until(drawn, lines, timeout=40)
        charts = browser.value("""[...document.querySelectorAll('.card')].map(card => [card.querySelector('h2').textContent,
            card.querySelectorAll('path').length, [...card.querySelectorAll('span')].map(name => name.textContent.trim())])""")
        self.assertEqual(len(charts), 6)
        self.assertGreaterEqual(len([title for title, count, _ in charts if count > 1]), 5, charts)
        for title, count, names in charts:
            self.assertEqual(len(names), count, f"each line has a name: {title}")
            self.assertEqual(len(set(names) - {"", "undefined"}), count, f"{title}: {names}")
        self.assertEqual({name for title, _, names in charts if "replica" in title for name in names},
                         {self.server.admin, self.secured.admin})
        if SCREENSHOTS:
            browser.screenshot(os.path.join(SCREENSHOTS, "console_page.png"))
        self.assertEqual([error for error in browser.errors if "favicon" not in error], [])


if __name__ == "__main__":
    cluster.main()
