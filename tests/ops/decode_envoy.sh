#!/usr/bin/env bash
# Decodes deploy/envoy.yaml with Envoy's own protos, so that a misspelt field or a wrong type is an error. They come with the npm
# package @grpc/grpc-js-xds; references between names and validation rules are not looked at. Needs npm, protoc,
# python3-protobuf and python3-yaml.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent @grpc/grpc-js-xds@1.14.1 >/dev/null && tar -xzf grpc-grpc-js-xds-*.tgz)
deps=$work/package/deps
/usr/bin/python3 - "$deps" "$work" ../../deploy/envoy.yaml <<'PYTHON'
import importlib, os, re, subprocess, sys
deps, work, config = sys.argv[1:]
roots = [os.path.join(deps, name) for name in sorted(os.listdir(deps))]
def find(name):
    return next((os.path.join(root, name) for root in roots if os.path.exists(os.path.join(root, name))), None)
wanted = ["envoy/config/bootstrap/v3/bootstrap.proto",
          "envoy/extensions/filters/network/http_connection_manager/v3/http_connection_manager.proto",
          "envoy/extensions/filters/http/router/v3/router.proto",
          "envoy/extensions/filters/http/grpc_stats/v3/config.proto",
          "envoy/extensions/retry/host/previous_hosts/v3/previous_hosts.proto",
          "envoy/extensions/upstreams/http/v3/http_protocol_options.proto"]
missing = [name for name in wanted if not find(name)]
print("without protos, taken as they are:", ", ".join(missing) or "none")
seen, todo = set(), [name for name in wanted if find(name)]
while todo:
    name = todo.pop()
    if name in seen or name.startswith("google/protobuf/"):
        continue
    path = find(name)
    assert path, f"{name} is missing"
    seen.add(name)
    todo += re.findall(r'^import (?:public )?"([^"]+)";', open(path, encoding="utf-8").read(), re.M)
# A newer field option than the package's own validate.proto has.
validate = find("validate/validate.proto")
text = open(validate, encoding="utf-8").read()
if "ignore_empty = 26" not in text:
    text = text.replace("message StringRules {", "message StringRules {\n    optional bool ignore_empty = 26;")
    open(validate, "w", encoding="utf-8").write(text)
out = os.path.join(work, "python")
os.mkdir(out)
subprocess.run(["protoc", *[f"--proto_path={root}" for root in roots], f"--python_out={out}", *sorted(seen)], check=True)
sys.path.insert(0, out)
import google
for package in ("google",):
    google.__path__.append(os.path.join(out, "google"))
import yaml
from google.protobuf import json_format
for name in seen:
    importlib.import_module(name[:-len(".proto")].replace("/", ".") + "_pb2")
from envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
types = {"type.googleapis.com/" + t for t in ()}
def drop_unknown(value):
    """typed_config whose proto the package lacks becomes an empty Any of a type there is."""
    if isinstance(value, dict):
        kind = value.get("@type", "")
        if kind and not any(kind.endswith(known) for known in have):
            print("not decoded:", kind)
            return {"@type": "type.googleapis.com/google.protobuf.Empty", "value": {}}
        return {key: drop_unknown(each) for key, each in value.items()}
    if isinstance(value, list):
        return [drop_unknown(each) for each in value]
    return value
from google.protobuf import empty_pb2, symbol_database
have = {message for name in seen for message in symbol_database.Default().GetMessages([name])}
document = drop_unknown(yaml.safe_load(open(config, encoding="utf-8")))
json_format.ParseDict(document, Bootstrap())
document["static_resources"]["clusters"][0]["lb_polisy"] = "MAGLEV"
try:
    json_format.ParseDict(document, Bootstrap())
except json_format.ParseError as error:
    assert "lb_polisy" in str(error)
else:
    raise SystemExit("a misspelt field was not found")
print("deploy/envoy.yaml decodes;", len(seen), "protos")
PYTHON
