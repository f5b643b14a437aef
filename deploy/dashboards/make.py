#!/usr/bin/env python3
"""Grafana dashboards from one table.

  make.py                    writes the dashboards (*.json beside this file)
  make.py --check            fails when they are not what this file makes, or when an expression uses a metric that
                             ../prometheus/metrics.json does not have, or uses it as what it is not
  make.py --metrics FILE     writes ../prometheus/metrics.json from a server's /metrics page (- is standard input)

metrics.json is the table of the server's metrics: type, labels and help by name. The tests hold it to a running server. It is
not beside this file, since Grafana takes every *.json here for a dashboard.
"""
import json
import os
import re
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
METRICS = os.path.join(os.path.dirname(FOLDER), "prometheus", "metrics.json")
SELECT = 'model=~"$model",instance=~"$instance"'
SELECTED = "{" + SELECT + "}"


def quantile(q, name, by=""):
    return f"histogram_quantile({q}, sum by (le{by}) (rate({name}_bucket{SELECTED}[$__rate_interval])))"


def per_second(name, by="", more=""):
    selector = "{" + SELECT + more + "}"
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({name}{selector}[$__rate_interval]))"


def now(name, by="", more=""):
    selector = "{" + SELECT + more + "}"
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({name}{selector})"


def mean(name, by="", more=""):
    return f"{per_second(name + '_sum', by, more)} / {per_second(name + '_count', by, more)}"


def percentiles(name):
    return [(quantile(q, name), f"p{int(q * 100)}") for q in (0.5, 0.95, 0.99)]


ERRORS = 'outcome=~"error|unavailable"'
ERROR_RATIO = f"{per_second('efla_requests_total', more=',' + ERRORS)} / {per_second('efla_requests_total')}"
REJECTED_RATIO = f"{per_second('efla_requests_rejected_total')} / {per_second('efla_requests_total')}"

# Rows of panels: (kind, width of 24, title, unit, [(expression, legend)], what it shows).
DASHBOARDS = {
    "overview": ("efla: overview", [
        ("Now", [
            ("stat", 3, "Requests", "reqps", [(per_second("efla_requests_total"), "")], "Ended requests a second."),
            ("stat", 3, "Generated", "short", [(per_second("efla_generation_tokens_total"), "")],
             "Tokens drawn a second."),
            ("stat", 3, "Prompt", "short", [(per_second("efla_prompt_tokens_total"), "")],
             "Prompt tokens computed a second."),
            ("stat", 3, "Errors", "percentunit", [(ERROR_RATIO, "")], "Share of requests that ended in an error of the server's."),
            ("stat", 3, "Refused", "percentunit", [(REJECTED_RATIO, "")], "Share of requests refused before they ran."),
            ("stat", 3, "First token p95", "s", [(quantile(0.95, "efla_time_to_first_token_seconds"), "")], ""),
            ("stat", 3, "Between tokens p95", "s", [(quantile(0.95, "efla_inter_token_latency_seconds"), "")], ""),
            ("stat", 3, "Replicas ready", "short", [(now("efla_ready"), ""), (now("efla_draining"), "draining")],
             "Replicas that welcome new requests, and those that drain."),
        ]),
        ("Service level", [
            ("timeseries", 12, "Error budget burn", "short",
             [(f"efla:error_ratio:rate{w} / 0.001", w) for w in ("5m", "1h", "6h", "3d")],
             "Times the error rate that would use up a 99.9 % budget in 30 days exactly. Recorded by deploy/prometheus."),
            ("timeseries", 12, "First token within a second", "percentunit",
             [(f"efla:first_token_slow_ratio:rate{w}", "slower, " + w) for w in ("5m", "1h", "6h", "3d")],
             "Share of first tokens that took longer than a second."),
        ]),
        ("Traffic", [
            ("timeseries", 8, "Requests by outcome", "reqps", [(per_second("efla_requests_total", "outcome"), "{{outcome}}")], ""),
            ("timeseries", 8, "Calls by method and code", "reqps",
             [(per_second("efla_grpc_calls_handled_total", "method, code") + " > 0", "{{method}} {{code}}")], ""),
            ("timeseries", 8, "Refusals by reason", "reqps",
             [(per_second("efla_requests_rejected_total", "reason"), "{{reason}}")], ""),
        ]),
        ("Saturation", [
            ("timeseries", 8, "Waiting and running", "short",
             [(now("efla_requests_waiting"), "waiting"), (now("efla_requests_running"), "running"),
              (now("efla_requests_parked"), "parked")], "Parked requests wait for their reader."),
            ("timeseries", 8, "Oldest wait", "s", [(f"max (efla_queue_age_seconds{SELECTED})", "oldest")], ""),
            ("timeseries", 8, "State pool", "percentunit",
             [(f"max by (instance) (efla_state_pool_usage_ratio{SELECTED})", "{{instance}}")], "Slots in use."),
            ("timeseries", 12, "Engine busy", "percentunit",
             [(per_second("efla_engine_busy_seconds_total", "instance, phase"), "{{instance}} {{phase}}")],
             "Share of the time in which a step runs."),
            ("timeseries", 12, "Rows in a step", "short", [(mean("efla_batch_size", "phase"), "{{phase}}")], ""),
        ]),
    ]),
    "latency": ("efla: latency", [
        ("Percentiles", [
            ("timeseries", 12, "First token", "s", percentiles("efla_time_to_first_token_seconds"), "From the submission."),
            ("timeseries", 12, "Between tokens", "s", percentiles("efla_inter_token_latency_seconds"), ""),
            ("timeseries", 12, "Whole requests", "s", percentiles("efla_request_duration_seconds"), ""),
            ("timeseries", 12, "A token, per request", "s", percentiles("efla_time_per_output_token_seconds"),
             "Time after the first token by the tokens after it."),
        ]),
        ("Where the time goes", [
            ("timeseries", 12, "Phases, mean", "s",
             [(mean(f"efla_request_{phase}_seconds"), phase) for phase in ("queue", "prefill", "decode")], ""),
            ("timeseries", 12, "Steps, mean", "s", [(mean("efla_step_seconds", "phase"), "{{phase}}")], ""),
            ("heatmap", 12, "First token", "s",
             [(f"sum by (le) (increase(efla_time_to_first_token_seconds_bucket{SELECTED}[$__rate_interval]))", "{{le}}")], ""),
            ("timeseries", 12, "Tokens in a step", "short", [(mean("efla_step_tokens"), "mean")], ""),
        ]),
        ("Calls", [
            ("timeseries", 12, "Calls, p95", "s", [(quantile(0.95, "efla_grpc_call_seconds", ", method"), "{{method}}")], ""),
            ("timeseries", 12, "Sizes of requests, mean", "short",
             [(mean("efla_request_prompt_tokens"), "prompt"), (mean("efla_request_generation_tokens"), "generated")], ""),
        ]),
    ]),
    "sessions": ("efla: sessions", [
        ("Sessions", [
            ("timeseries", 8, "Sessions", "short", [(now("efla_sessions", "instance"), "{{instance}}")], "Those that a server knows."),
            ("timeseries", 8, "Turns under way", "short", [(now("efla_session_turns_active", "instance"), "{{instance}}")], ""),
            ("timeseries", 8, "Contexts by tier", "short", [(now("efla_session_contexts", "tier"), "{{tier}}")],
             "The highest tier that holds a context."),
        ]),
        ("Movement", [
            ("timeseries", 8, "Lifts by origin", "ops", [(per_second("efla_session_lifts_total", "from"), "{{from}}")],
             "States brought to the device. Those from the shared store are what lost affinity costs."),
            ("timeseries", 8, "Sinks", "ops", [(per_second("efla_session_sinks_total"), "sinks")], ""),
            ("timeseries", 8, "Taken over from other servers", "ops",
             [(per_second("efla_session_takeovers_total", "instance"), "{{instance}}")], ""),
        ]),
        ("Stores", [
            ("timeseries", 8, "Revisions that no store has", "short",
             [(now("efla_session_dirty_revisions", "instance"), "{{instance}}")], "What a crash would lose."),
            ("timeseries", 8, "Written", "Bps", [(per_second("efla_session_stored_bytes_total", "instance"), "{{instance}}")], ""),
            ("timeseries", 8, "Failed calls of stores", "ops",
             [(per_second("efla_session_store_errors_total", "instance"), "{{instance}}")], ""),
            ("timeseries", 8, "Host memory", "bytes", [(now("efla_session_host_bytes", "instance"), "{{instance}}")], ""),
            ("timeseries", 8, "Prefix cache: prompts that hit", "percentunit",
             [(f"{per_second('efla_prefix_cache_hits_total')} / {per_second('efla_prefix_cache_lookups_total')}", "hits")], ""),
            ("timeseries", 8, "Prefix cache: tokens not computed", "short",
             [(per_second("efla_prefix_cache_hit_tokens_total"), "tokens"), (now("efla_prefix_cache_slots"), "slots held")], ""),
        ]),
    ]),
    "replicas": ("efla: replicas", [
        ("Replicas", [
            ("table", 24, "Replicas", "short",
             [(f"max by (instance) ({name}{SELECTED})", title) for name, title in
              (("efla_ready", "ready"), ("efla_draining", "draining"), ("efla_requests_running", "running"),
               ("efla_requests_waiting", "waiting"), ("efla_state_pool_usage_ratio", "slots used"),
               ("efla_startup_seconds", "start, s"))], ""),
            ("timeseries", 8, "Generated by replica", "short",
             [(per_second("efla_generation_tokens_total", "instance"), "{{instance}}")], "Tokens a second."),
            ("timeseries", 8, "Imbalance", "short",
             [(f"max (efla_requests_running{SELECTED}) / avg (efla_requests_running{SELECTED})", "most / mean")],
             "Running requests of the busiest replica by the mean."),
            ("timeseries", 8, "Steps a second", "ops", [(per_second("efla_step_seconds_count", "instance"), "{{instance}}")], ""),
        ]),
        ("Engine", [
            ("timeseries", 8, "Since the last step", "s",
             [(f"(time() - max by (instance) (efla_engine_last_step_timestamp_seconds{SELECTED})) and on (instance) "
               f"(max by (instance) (efla_requests_running{SELECTED}) > 0)", "{{instance}}")],
             "While requests run: more than a minute is a device that hangs."),
            ("timeseries", 8, "Engine's own work", "percentunit",
             [(per_second("efla_engine_host_seconds_total", "instance"), "{{instance}}")], "Between steps; the device is idle then."),
            ("timeseries", 8, "State slots", "short", [(now("efla_state_slots", "instance, kind"), "{{instance}} {{kind}}")], ""),
            ("timeseries", 8, "State pool", "bytes", [(now("efla_state_pool_bytes", "instance, kind"), "{{instance}} {{kind}}")], ""),
            ("timeseries", 8, "Prompt tokens that wait", "short", [(now("efla_queue_prompt_tokens", "instance"), "{{instance}}")], ""),
            ("timeseries", 8, "A state slot", "bytes", [(f"max (efla_state_slot_bytes{SELECTED})", "slot")], ""),
        ]),
        ("Access", [
            ("timeseries", 6, "Credentials that fail", "reqps", [(per_second("efla_auth_failures_total", "reason"), "{{reason}}")], ""),
            ("timeseries", 6, "Calls by tenant", "reqps", [(per_second("efla_tenant_calls_total", "tenant"), "{{tenant}}")], ""),
            ("timeseries", 6, "Tokens by tenant", "short", [(per_second("efla_tenant_tokens_total", "tenant"), "{{tenant}}")], "A second."),
            ("timeseries", 6, "Refusals by tenant", "reqps", [(per_second("efla_tenant_refusals_total", "tenant, limit"), "{{tenant}} {{limit}}")], ""),
            ("timeseries", 12, "Running by tenant", "short", [(now("efla_tenant_requests_running", "tenant"), "{{tenant}}")], ""),
            ("timeseries", 12, "Certificates end in", "s",
             [(f"min by (instance, usage) (efla_tls_cert_not_after_timestamp_seconds{SELECTED}) - time()", "{{instance}} {{usage}}")], ""),
        ]),
        ("Process", [
            ("timeseries", 6, "Memory", "bytes", [('process_resident_memory_bytes{job="efla",instance=~"$instance"}', "{{instance}}")], ""),
            ("timeseries", 6, "CPU", "short",
             [('rate(process_cpu_seconds_total{job="efla",instance=~"$instance"}[$__rate_interval])', "{{instance}}")], "Cores."),
            ("timeseries", 6, "File descriptors", "percentunit",
             [('process_open_fds{job="efla",instance=~"$instance"} / process_max_fds{job="efla",instance=~"$instance"}', "{{instance}}")], ""),
            ("timeseries", 6, "Open calls", "short", [(now("efla_grpc_streams_active", "instance, method") + " > 0", "{{instance}} {{method}}")], ""),
            ("timeseries", 12, "Calls begun", "reqps", [(per_second("efla_grpc_calls_started_total", "instance"), "{{instance}}")], ""),
            ("timeseries", 12, "A scrape", "s", [(f"max by (instance) (efla_metrics_scrape_seconds{SELECTED})", "{{instance}}")], "Time to write the page."),
            ("table", 12, "Builds", "short",
             [(f"max by (instance, version, build, compiler) (efla_build_info{SELECTED})", "info")],
             "Replicas of one model should have one version and one build, the program's build id."),
            ("table", 12, "Models", "short", [(f"max by (instance, model, type, device, dtype) (efla_model_info{SELECTED})", "model")], ""),
        ]),
    ]),
}


def variable(name, query):
    return {"name": name, "type": "query", "label": name, "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": query, "refId": name}, "definition": query, "refresh": 2, "includeAll": True, "multi": True,
            "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "sort": 1}


def panel(number, kind, x, y, width, height, title, unit, targets, description):
    made = {
        "id": number, "type": kind, "title": title, "gridPos": {"h": height, "w": width, "x": x, "y": y},
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "targets": [{"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend or "__auto",
                     "datasource": {"type": "prometheus", "uid": "${datasource}"},
                     **({"format": "table", "instant": True} if kind == "table" else {}),
                     **({"format": "heatmap"} if kind == "heatmap" else {})}
                    for i, (expression, legend) in enumerate(targets)],
        "fieldConfig": {"defaults": {"unit": unit, "min": 0} if kind != "heatmap" else {"unit": unit}, "overrides": []},
        "options": {},
    }
    if description:
        made["description"] = description
    if kind == "stat":
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                           "colorMode": "none", "graphMode": "area", "textMode": "value"}
        made["fieldConfig"]["defaults"]["noValue"] = "no traffic"
    elif kind == "timeseries":
        made["fieldConfig"]["defaults"]["custom"] = {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"}
        made["options"] = {"legend": {"displayMode": "list", "placement": "bottom"},
                           "tooltip": {"mode": "multi", "sort": "desc"}}
    elif kind == "heatmap":
        made["options"] = {"calculate": False, "yAxis": {"unit": unit}, "color": {"mode": "scheme", "scheme": "Blues"}}
    elif kind == "table":
        made["transformations"] = [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True},
                                           "renameByName": {f"Value #{chr(ord('A') + i)}": legend
                                                            for i, (_, legend) in enumerate(targets)}}}]
    return made


def dashboard(name, title, rows):
    panels, y, number = [], 0, 1
    for row_title, row_panels in rows:
        panels.append({"id": number, "type": "row", "title": row_title, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        number += 1
        y += 1
        x = height = 0
        for kind, width, *rest in row_panels:
            if x + width > 24:
                x, y = 0, y + height
            height = 4 if kind == "stat" else 8
            panels.append(panel(number, kind, x, y, width, height, *rest))
            number += 1
            x += width
        y += height
    return {
        "uid": f"efla-{name}", "id": None, "title": title, "tags": ["efla"], "schemaVersion": 39, "version": 1,
        "editable": True, "graphTooltip": 1, "timezone": "browser", "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"}, "annotations": {"list": []},
        "links": [{"type": "dashboards", "tags": ["efla"], "title": "efla", "asDropdown": True, "includeVars": True,
                   "keepTime": True}],
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "datasource",
             "current": {}, "refresh": 1},
            variable("model", "label_values(efla_ready, model)"),
            variable("instance", 'label_values(efla_ready{model=~"$model"}, instance)')]},
        "panels": panels,
    }


def files():
    return {f"{name}.json": json.dumps(dashboard(name, title, rows), indent=1) + "\n"
            for name, (title, rows) in DASHBOARDS.items()}


def expressions():
    """(dashboard, panel, expression) of all."""
    return [(name, panel[2], expression) for name, (_, rows) in DASHBOARDS.items() for _, panels in rows
            for panel in panels for expression, _ in panel[4]]


def read_metrics(text):
    """{name: {type, labels, help}} of an exposition."""
    table = {}
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            _, what, name, rest = line.split(" ", 3)
            table.setdefault(name, {"type": "", "labels": [], "help": ""})[what.lower()] = rest
        elif line:
            name = re.match(r"[\w:]+", line)[0]
            family = name if name in table else re.sub(r"_(bucket|sum|count)$", "", name)
            labels = set(re.findall(r'(\w+)="', line)) - {"le"}
            table[family]["labels"] = sorted(labels | set(table[family]["labels"]))
    return dict(sorted(table.items()))


def load_table():
    with open(METRICS, encoding="utf-8") as file:
        return json.load(file)


RECORDED = re.compile(r"efla:\w+:\w+")
METRIC = re.compile(r"\b(?:efla|process)_\w+")


def findings(expression, table):
    """What is wrong with an expression's metrics."""
    found = []
    bare = re.sub(r'"[^"]*"', '""', RECORDED.sub("1", expression))
    for name in METRIC.findall(bare):
        suffix = re.search(r"_(bucket|sum|count)$", name)
        family = name if name in table else name[:suffix.start()] if suffix else name
        if family not in table:
            found.append(f"there is no metric {name}")
            continue
        kind = table[family]["type"]
        if kind == "histogram" and family == name:
            found.append(f"{name} is a histogram; use its _bucket, _sum or _count")
        counts = kind in ("counter", "histogram")
        rated = re.search(r"\b(?:rate|increase|irate)\(" + name + r"\b", bare) is not None
        if counts != rated:
            found.append(f"{name} is a {kind} and {'has a' if rated else 'needs a'} rate")
        for matched in re.findall(re.escape(name) + r"\{([^}]*)\}", expression):
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matched):
                if label not in table[family]["labels"] + ["instance", "job", "le"]:
                    found.append(f"{name} has no label {label}")
    if "histogram_quantile" in bare and "_bucket" not in bare:
        found.append("histogram_quantile of what has no buckets")
    return found


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "--metrics":
        text = sys.stdin.read() if sys.argv[2] == "-" else open(sys.argv[2], encoding="utf-8").read()
        with open(METRICS, "w", encoding="utf-8") as file:
            json.dump(read_metrics(text), file, indent=1)
            file.write("\n")
        return 0
    if len(sys.argv) > 1 and sys.argv[1] != "--check":
        print(__doc__)
        return 2
    if len(sys.argv) == 1:
        for name, text in files().items():
            with open(os.path.join(FOLDER, name), "w", encoding="utf-8") as file:
                file.write(text)
        return 0
    bad = 0
    table = load_table()
    for name, title, expression in expressions():
        for finding in findings(expression, table):
            print(f"{name}, {title}: {finding}: {expression}", file=sys.stderr)
            bad += 1
    for name, text in files().items():
        path = os.path.join(FOLDER, name)
        if not os.path.exists(path) or open(path, encoding="utf-8").read() != text:
            print(f"{name} is not what make.py makes; run it", file=sys.stderr)
            bad += 1
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
