#!/usr/bin/env python3
"""The Prometheus operator's PrometheusRule from the rule files beside this script.

  make_rules.py             writes ../kubernetes/overlays/monitoring/rules.yaml from recording.yml and alerts.yml
  make_rules.py --check     fails when it is not what this script makes
"""
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
SOURCES = ("recording.yml", "alerts.yml")
MADE = os.path.join(os.path.dirname(FOLDER), "kubernetes", "overlays", "monitoring", "rules.yaml")

HEAD = """\
# Made by deploy/prometheus/make_rules.py from recording.yml and alerts.yml there; change those.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: efla-rules
spec:
  groups:
"""


def groups(name, text):
    """The lines below a rule file's `groups:`, its last key."""
    lines = text.partition("\ngroups:\n")[2].splitlines()
    if not lines or any(line[:1] not in ("", " ") for line in lines):
        raise SystemExit(f"{name} does not end with its groups")
    return lines


def rules(folder=FOLDER):
    """The object's text: the groups as they are, comments included, two columns further in."""
    made = HEAD
    for name in SOURCES:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            made += "".join(f"  {line}".rstrip() + "\n" for line in groups(name, file.read()))
    return made


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__)
        return 2
    made = rules()
    if len(sys.argv) == 1:
        with open(MADE, "w", encoding="utf-8") as file:
            file.write(made)
        return 0
    if not os.path.exists(MADE) or open(MADE, encoding="utf-8").read() != made:
        print(f"{os.path.basename(MADE)} is not what make_rules.py makes; run it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
