"""Dockerfile, compose files, Kubernetes objects, Envoy's configuration and the systemd unit, read as strictly as can be without the
programs that take them: every key is known, every reference has its other end, and what must agree between files agrees.

usage: deployment_test.py [unittest arguments]
"""
import copy
import glob
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import jsonschema
import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEPLOY = os.path.join(ROOT, "deploy")


class StrictLoader(yaml.SafeLoader):
    """Keys that come twice are errors."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"{node.start_mark}: {twice} twice")
        return super().construct_mapping(node, deep)


def load(*path):
    with open(os.path.join(DEPLOY, *path), encoding="utf-8") as file:
        return yaml.load(file, StrictLoader)


def load_all(path):
    with open(path, encoding="utf-8") as file:
        return [each for each in yaml.load_all(file, StrictLoader) if each]


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def load_check_image():
    specification = importlib.util.spec_from_file_location("check_image", os.path.join(DEPLOY, "check_image.py"))
    module = sys.modules["check_image"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


check_image = load_check_image()
instructions = check_image.instructions


def check_flags(test, words):
    """The flags of a command line are the server's."""
    options = read("server", "options.cc")
    for flag in (word.split("=")[0][2:] for word in words if word.startswith("--")):
        test.assertRegex(options, rf'"(--)?{flag}"', flag)


class YamlTest(unittest.TestCase):
    def test_all_files_pass_yamllint(self):
        files = [path for path in glob.glob(os.path.join(DEPLOY, "**", "*.y*ml"), recursive=True)]
        self.assertGreater(len(files), 15)
        rules = ("{extends: default, rules: {line-length: {max: 140}, document-start: disable, braces: {max-spaces-inside: 0}, "
                 "comments: {min-spaces-from-content: 1}, truthy: {check-keys: false}, indentation: {indent-sequences: consistent}}}")
        result = subprocess.run(["yamllint", "-s", "-d", rules, *files], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout)


class DockerfileTest(unittest.TestCase):
    KNOWN = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "LABEL", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}

    @staticmethod
    def findings(text):
        """What a linter would say."""
        found = []
        lines = instructions(text)
        for name, rest in lines:
            if name not in DockerfileTest.KNOWN:
                found.append(f"{name} is unknown or has no place here")
            if name in ("ENTRYPOINT",) and not isinstance(json.loads(rest) if rest.startswith("[") else "", list):
                found.append(f"{name} is not in exec form")
            if name == "FROM" and (rest.split()[0].endswith(":latest") or ":" not in rest and "${" not in rest):
                found.append(f"FROM {rest} has no version")
            if name == "RUN" and "apt-get install" in rest and ("--no-install-recommends" not in rest or "rm -rf /var/lib/apt/lists" not in rest):
                found.append(f"RUN leaves package lists or installs what is only recommended: {rest}")
            if name == "RUN" and re.search(r"\bsudo\b|curl [^|]*\| *(ba)?sh|chmod 777", rest):
                found.append(f"RUN {rest}")
            if name == "RUN" and re.match(r"--(?!mount=type=cache,target=/\S+ )", rest):
                found.append(f"RUN's option is unknown: {rest}")
        last = max(i for i, (name, _) in enumerate(lines) if name == "FROM")
        stage = dict(lines[last:])
        for wanted in ("USER", "HEALTHCHECK", "ENTRYPOINT", "LABEL", "STOPSIGNAL"):
            if wanted not in stage:
                found.append(f"the last stage has no {wanted}")
        if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", stage.get("USER", "")):
            found.append("USER is not a number above 0")
        if any(name == "COPY" and rest.split()[0] == "." for name, rest in lines):
            found.append("COPY . copies everything: any change builds all again")

        def first(wanted, part):
            """The number of the first such instruction with such a part; none where there is none."""
            return next((i for i, (name, rest) in enumerate(lines) if name == wanted and part in rest), None)
        packages, sources = first("RUN", "install_packages"), first("COPY", "server/")
        compiled, documents = first("RUN", "cmake --build"), first("COPY", "README.md")
        if None in (packages, sources, compiled, documents):
            found.append("a step is missing: packages, sources, the compiler, documents")
        else:
            if sources < packages:
                found.append("sources are copied before packages are installed")
            if documents < compiled:
                found.append("documents are copied before the compiler runs: a changed one compiles all again")
        return found

    def test_it_passes_the_checks(self):
        self.assertEqual(self.findings(read("Dockerfile")), [])

    def test_the_checks_find_what_they_are_to_find(self):
        good = read("Dockerfile")
        for old, new, finding in (
                ("USER 65532:65532", "USER root", "USER is not a number"),
                ("HEALTHCHECK ", "# ", "has no HEALTHCHECK"),
                ('ENTRYPOINT ["/opt/efla/bin/efla_server"]', "ENTRYPOINT efla_server", "ENTRYPOINT is not in exec form"),
                ("ARG VERSION=0.1.0", "ADD http://somewhere /x", "ADD is unknown"),
                ("COPY server/ server/", "COPY . .", "COPY . copies everything"),
                ("COPY server/ server/\n", "", "a step is missing"),
                ("FROM ${DEBIAN} AS serve", "FROM debian:latest AS serve", "debian:latest AS serve has no version"),
                ("ARG VERSION=0.1.0", "RUN apt-get install -y curl", "RUN leaves package lists"),
                ("ARG VERSION=0.1.0", "RUN chmod 777 /opt", "RUN chmod 777 /opt"),
                ("RUN --mount=type=cache", "RUN --mount=type=caches", "RUN's option is unknown"),
                ("COPY deploy/install_packages.sh", "COPY server/ deploy/install_packages.sh", "sources are copied before packages"),
                ("COPY CMakeLists.txt", "COPY README.md CMakeLists.txt", "documents are copied before the compiler")):
            self.assertIn(old, good)
            found = self.findings(good.replace(old, new))
            self.assertTrue(any(finding in each for each in found), f"{new}: {found}")

    def test_what_it_copies_is_there_and_let_in(self):
        kept = [line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")]
        self.assertIn("*", read(".dockerignore").splitlines())
        copied = [word.rstrip("/") for name, rest in instructions(read("Dockerfile")) if name == "COPY" and "--from" not in rest
                  for word in rest.split()[:-1]]
        self.assertGreater(len(copied), 8)
        for path in copied:
            self.assertTrue(os.path.exists(os.path.join(ROOT, path)), path)
            self.assertTrue(any(path == keep or path.startswith(keep + "/") for keep in kept), path)

    def test_every_folder_that_the_build_needs_is_copied(self):
        cmake = read("CMakeLists.txt")
        copied = read("Dockerfile")
        for folder in re.findall(r"add_subdirectory\((\w+)\)", cmake):
            if folder != "tests":
                self.assertIn(f"COPY {folder}/ {folder}/", copied)

    def test_its_programs_and_flags_exist(self):
        text = read("Dockerfile")
        options = read("server", "options.cc")
        for name in re.findall(r"EFLA_SERVER_([A-Z_]+)=", text):
            self.assertIn(f'"{name.lower().replace("_", "-")}"', options)
        self.assertIn('add_subcommand("health"', read("client", "health.cc"))


class ImagePlanTest(unittest.TestCase):
    """What deploy/check_image.py would do; that script itself, as root, does it."""

    @staticmethod
    def context():
        return check_image.context_files(ROOT, check_image.Ignore(read(".dockerignore")))

    @staticmethod
    def steps(files, text=None, cuda=""):
        """{the step's text: its layer's key}"""
        stages = check_image.plan(text or read("Dockerfile"), files, {"CUDA": cuda})
        return {f"{stage.name}: {step.text}": step.key for stage in stages for step in stage.steps}

    def changed(self, *, path=None, **kwargs):
        """The steps that a builder carries out again after a change of one file, or with other arguments."""
        files = self.context()
        before = self.steps(files)
        with tempfile.NamedTemporaryFile("w") as file:
            if path:
                self.assertIn(path, files)
                file.write("changed")
                file.flush()
                files[path] = file.name
            after = self.steps(files, **kwargs)
        self.assertEqual(list(before), list(after))
        return [step for step, key in after.items() if key != before[step]]

    def test_the_context_is_what_the_image_is_made_from(self):
        files = self.context()
        for path in ("server/main.cc", "model/demo/model.safetensors", "deploy/cuda/install.sh", "README.md"):
            self.assertEqual(files[path], os.path.join(ROOT, path))
        for path in files:
            self.assertNotRegex(path, r"^(build|tests|\.git)/|__pycache__|^deploy/(?!cuda/|cmake/)\w+/|/README\.md$")

    def test_ignore_patterns_mean_what_they_mean_to_a_builder(self):
        ignore = check_image.Ignore("# all\n*\n!a\n!b/c\n**/*.md\n!README.md\na/?.o\n")
        for path, excluded in (("x", True), ("a", False), ("a/deep/file", False), ("a/deep/x.md", True), ("README.md", False),
                               ("a/README.md", True), ("b", True), ("b/c/d", False), ("b/cd", True), ("a/x.o", True), ("a/xy.o", False)):
            self.assertEqual(ignore.excludes(path), excluded, path)
        self.assertTrue(ignore.may_keep_below("b"))
        self.assertFalse(ignore.may_keep_below("x"))

    def test_a_changed_source_installs_nothing_and_a_changed_document_compiles_nothing(self):
        source = self.changed(path="server/main.cc")
        self.assertTrue(source[0].startswith("build: COPY server/"), source)
        self.assertFalse([step for step in source if "install_packages.sh build" in step or "install.sh" in step], source)
        document = self.changed(path="CHANGELOG.md")
        self.assertEqual([step.split()[1] for step in document], ["COPY", "RUN", "COPY"], document)
        self.assertFalse([step for step in document if "cmake --build" in step], document)
        packages = self.changed(path="deploy/packages.txt")
        self.assertIn("install_packages.sh build", packages[1])
        self.assertEqual(self.changed(), [])

    def test_cuda_shares_the_packages_of_debian(self):
        again = self.changed(cuda="13-0")
        self.assertFalse([step for step in again if "install_packages.sh build" in step], again)
        self.assertEqual(len([step for step in again if "install.sh" in step]), 2, again)

    def test_what_it_does_not_understand_is_an_error(self):
        text, files = read("Dockerfile"), self.context()
        for old, new in (("STOPSIGNAL SIGTERM", "ADD http://somewhere /x"), ("COPY proto/ proto/", "COPY protos/ proto/"),
                         ("COPY proto/", "COPY --chown=1 proto/"), ("--mount=type=cache", "--mount=type=bind")):
            self.assertIn(old, text)
            with self.assertRaises(SystemExit, msg=new):
                self.steps(files, text.replace(old, new))
        with self.assertRaisesRegex(SystemExit, "has no argument CUDA"):
            self.steps(files, text.replace("ARG CUDA", "ARG OTHER"))

    def test_the_stand_ins_are_what_is_installed(self):
        named = set(re.findall(r"(?:cuda|lib)[a-z-]*[a-z](?=-\$version)", read("deploy", "cuda", "install.sh")))
        self.assertGreaterEqual(named, {"cuda-nvcc", "cuda-cudart-dev", "libcublas-dev", "libcublas", "cuda-toolkit"})
        self.assertLessEqual(named - {"cuda-toolkit"}, set(check_image.STAND_INS))


# The keys of the compose specification that are of use here.
SERVICE_KEYS = {"image", "build", "restart", "stop_grace_period", "depends_on", "read_only", "tmpfs", "cap_drop", "security_opt",
                "ulimits", "expose", "volumes", "networks", "command", "healthcheck", "ports", "environment", "deploy"}


class ComposeTest(unittest.TestCase):
    def test_keys_are_known_and_references_have_their_ends(self):
        compose = load("compose.yaml")
        self.assertLessEqual({key for key in compose if not key.startswith("x-")}, {"name", "services", "networks", "volumes"})
        services = compose["services"]
        self.assertLessEqual({"replica-1", "replica-2", "redis", "balancer", "prometheus", "grafana"}, set(services))
        for name, service in services.items():
            self.assertLessEqual(set(service), SERVICE_KEYS, name)
            depends = service.get("depends_on", [])
            for other in depends:
                self.assertIn(other, services)
                if isinstance(depends, dict) and depends[other]["condition"] == "service_healthy":
                    self.assertIn("healthcheck", services[other])
            for network in service.get("networks", []):
                self.assertIn(network, compose["networks"])
            for volume in service.get("volumes", []):
                source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
                if source.startswith("."):
                    self.assertTrue(os.path.exists(os.path.join(DEPLOY, source)), volume)
                else:
                    self.assertIn(source, compose["volumes"])
            for port in service.get("ports", []):
                self.assertRegex(port, r"^(127\.0\.0\.1:)?\d+:\d+$")

    def test_only_the_grpc_port_is_open_to_the_outside(self):
        services = load("compose.yaml")["services"]
        opened = [port for service in services.values() for port in service.get("ports", []) if not port.startswith("127.")]
        self.assertEqual(opened, ["50050:50050"])

    def test_names_agree_with_balancer_and_prometheus(self):
        services = load("compose.yaml")["services"]
        for name in re.findall(r"(replica-\d+):50051", read("deploy", "haproxy.cfg")):
            self.assertIn(name, services)
        for job in load("prometheus", "prometheus.yml")["scrape_configs"]:
            for target in job["static_configs"][0]["targets"]:
                self.assertIn(target.split(":")[0], services)
        datasource = load("grafana", "datasources", "prometheus.yaml")["datasources"][0]
        self.assertIn(re.match(r"http://([\w-]+):", datasource["url"])[1], services)

    @staticmethod
    def no_dashboards(folder):
        """The files of a folder that Grafana takes for dashboards, each *.json however deep, and that are none of ours."""
        found, uids = [], set()
        for path in glob.glob(os.path.join(folder, "**", "*.json"), recursive=True):
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            if not (content.get("panels") and content.get("title") and content.get("schemaVersion")) or content["uid"] in uids:
                found.append(os.path.relpath(path, folder))
            uids.add(content.get("uid"))
        return found

    def test_grafana_finds_dashboards_and_nothing_else(self):
        grafana = load("compose.yaml")["services"]["grafana"]
        mounted = {volume.split(":")[1]: os.path.join(DEPLOY, volume.split(":")[0]) for volume in grafana["volumes"]}
        for provider in load("grafana", "dashboards", "efla.yaml")["providers"]:
            folder = mounted[provider["options"]["path"]]
            self.assertEqual(self.no_dashboards(folder), [])
            home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
            self.assertTrue(os.path.exists(os.path.join(folder, os.path.relpath(home, provider["options"]["path"]))), home)
            with tempfile.TemporaryDirectory() as scratch:
                shutil.copytree(folder, scratch, dirs_exist_ok=True)
                os.mkdir(os.path.join(scratch, "more"))
                shutil.copy(os.path.join(DEPLOY, "prometheus", "metrics.json"), os.path.join(scratch, "more"))
                self.assertEqual(self.no_dashboards(scratch), ["more/metrics.json"])

    def test_a_replica_is_given_the_time_it_needs(self):
        services = load("compose.yaml")["services"]
        for name in ("replica-1", "replica-2"):
            self.assertGreaterEqual(int(services[name]["stop_grace_period"].rstrip("s")), 3 + 60 + 5 + 10)
            self.assertTrue(services[name]["read_only"])
            self.assertEqual(services[name]["cap_drop"], ["ALL"])
            check_flags(self, services[name]["command"])

    def test_the_gpu_file_only_adds_to_services_there_are(self):
        gpu = load("compose.gpu.yaml")["services"]
        self.assertLessEqual(set(gpu), set(load("compose.yaml")["services"]))
        ids = [service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in gpu.values()]
        self.assertEqual(len({tuple(each) for each in ids}), len(ids), "each replica has a GPU of its own")


# ---- Kubernetes ----

STRING = {"type": "string"}
INT = {"type": "integer"}
BOOL = {"type": "boolean"}
MAP = {"type": "object", "additionalProperties": STRING}
NAME_OR_INT = {"type": ["string", "integer"]}


def obj(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def many(item):
    return {"type": "array", "minItems": 1, "items": item}


META = obj(["name"], name=STRING, namespace=STRING, labels=MAP, annotations=MAP)
SELECTOR = obj(matchLabels=MAP)
PROBE = obj(httpGet=obj(["path", "port"], path=STRING, port=NAME_OR_INT), tcpSocket=obj(["port"], port=NAME_OR_INT), periodSeconds=INT,
            timeoutSeconds=INT, failureThreshold=INT)
KEY_REF = obj(["name", "key"], name=STRING, key=STRING)
CONTAINER = obj(
    ["name", "image", "resources", "securityContext"], name=STRING, image=STRING,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]}, args=many(STRING),
    env=many(obj(["name"], name=STRING, value=STRING,
                 valueFrom=obj(fieldRef=obj(["fieldPath"], fieldPath=STRING), secretKeyRef=KEY_REF))),
    ports=many(obj(["name", "containerPort"], name=STRING, containerPort=INT)),
    startupProbe=PROBE, readinessProbe=PROBE, livenessProbe=PROBE, resources=obj(requests=MAP, limits=MAP),
    securityContext=obj(allowPrivilegeEscalation=BOOL, readOnlyRootFilesystem=BOOL, capabilities=obj(drop=many(STRING))),
    volumeMounts=many(obj(["name", "mountPath"], name=STRING, mountPath=STRING, readOnly=BOOL)))
POD = obj(
    ["containers"], serviceAccountName=STRING, automountServiceAccountToken=BOOL, terminationGracePeriodSeconds=INT,
    securityContext=obj(runAsNonRoot=BOOL, runAsUser=INT, runAsGroup=INT, fsGroup=INT, seccompProfile=obj(["type"], type=STRING)),
    topologySpreadConstraints=many(obj(maxSkew=INT, topologyKey=STRING, whenUnsatisfiable={"enum": ["ScheduleAnyway", "DoNotSchedule"]},
                                       labelSelector=SELECTOR, matchLabelKeys=many(STRING))),
    tolerations=many(obj(key=STRING, operator={"enum": ["Exists", "Equal"]}, effect=STRING, value=STRING)),
    containers=many(CONTAINER),
    volumes=many(obj(["name"], name=STRING, emptyDir=obj(sizeLimit=STRING, medium=STRING),
                     persistentVolumeClaim=obj(["claimName"], claimName=STRING, readOnly=BOOL))))
POLICY = obj(stabilizationWindowSeconds=INT, policies=many(obj(["type", "value", "periodSeconds"], type={"enum": ["Percent", "Pods"]}, value=INT, periodSeconds=INT)))
PEER = obj(namespaceSelector=SELECTOR, podSelector=SELECTOR, ipBlock=obj(["cidr"], cidr=STRING))
RULE_PORTS = many(obj(protocol={"enum": ["TCP", "UDP"]}, port=NAME_OR_INT))


# The operator's own pattern of a time.
TIME = {"type": "string", "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"}
NAMED = {"type": "string", "minLength": 1}
RECORD = obj(["record", "expr"], record={"type": "string", "pattern": r"^[a-zA-Z_:][a-zA-Z0-9_:]*$"}, expr=NAMED, labels=MAP)
ALERT = obj(["alert", "expr"], alert=NAMED, expr=NAMED, labels=MAP, annotations=MAP, **{"for": TIME, "keep_firing_for": TIME})


def kind(version, name, **fields):
    return obj(["apiVersion", "kind", "metadata"], apiVersion={"const": version}, kind={"const": name}, metadata=META, **fields)


KINDS = {
    "Namespace": kind("v1", "Namespace"),
    "ServiceAccount": kind("v1", "ServiceAccount", automountServiceAccountToken=BOOL),
    "Secret": kind("v1", "Secret", type=STRING, stringData=MAP),
    "Service": kind("v1", "Service", spec=obj(["selector", "ports"], type={"enum": ["ClusterIP"]}, clusterIP=STRING, selector=MAP, ports=many(
        obj(["name", "port"], name=STRING, port=INT, targetPort=NAME_OR_INT, appProtocol=STRING)))),
    "Deployment": kind("apps/v1", "Deployment", spec=obj(
        ["selector", "template"], replicas=INT, minReadySeconds=INT, progressDeadlineSeconds=INT, revisionHistoryLimit=INT,
        strategy=obj(type={"enum": ["RollingUpdate", "Recreate"]}, rollingUpdate=obj(maxUnavailable=INT, maxSurge=INT)), selector=SELECTOR,
        template=obj(["metadata", "spec"], metadata=obj(labels=MAP, annotations=MAP), spec=POD))),
    "PodDisruptionBudget": kind("policy/v1", "PodDisruptionBudget", spec=obj(maxUnavailable=INT, selector=SELECTOR, unhealthyPodEvictionPolicy={"enum": ["AlwaysAllow", "IfHealthyBudget"]})),
    "HorizontalPodAutoscaler": kind("autoscaling/v2", "HorizontalPodAutoscaler", spec=obj(
        ["scaleTargetRef", "maxReplicas", "metrics"], scaleTargetRef=obj(apiVersion=STRING, kind=STRING, name=STRING), minReplicas=INT, maxReplicas=INT,
        metrics=many(obj(["type", "pods"], type={"const": "Pods"}, pods=obj(["metric", "target"], metric=obj(["name"], name=STRING),
                                                                     target=obj(["type", "averageValue"], type={"const": "AverageValue"}, averageValue=STRING)))),
        behavior=obj(scaleUp=POLICY, scaleDown=POLICY))),
    "NetworkPolicy": kind("networking.k8s.io/v1", "NetworkPolicy", spec=obj(
        ["podSelector", "policyTypes"], podSelector=SELECTOR, policyTypes=many({"enum": ["Ingress", "Egress"]}),
        ingress=many({"type": "object", "additionalProperties": False, "properties": {"from": many(PEER), "ports": RULE_PORTS}}),
        egress=many(obj(to=many(PEER), ports=RULE_PORTS)))),
    "PodMonitor": kind("monitoring.coreos.com/v1", "PodMonitor", spec=obj(
        jobLabel=STRING, selector=SELECTOR, podMetricsEndpoints=many(obj(["port"], port=STRING, path=STRING, interval=STRING, honorLabels=BOOL)))),
    "PrometheusRule": kind("monitoring.coreos.com/v1", "PrometheusRule", spec=obj(["groups"], groups=many(
        obj(["name", "rules"], name=NAMED, interval=TIME, rules=many({"oneOf": [RECORD, ALERT]}))))),
}


def merge(base, patch):
    """A strategic merge: maps merge, lists of named things merge by name, other lists are replaced, null removes."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(base[key], value) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(each, dict) and "name" in each for each in base + patch):
        merged = list(base)
        for each in patch:
            at = next((i for i, other in enumerate(merged) if other["name"] == each["name"]), None)
            if at is None:
                merged.append(each)
            else:
                merged[at] = merge(merged[at], each)
        return merged
    return patch


def kustomize(folder):
    """The objects of a kustomization that uses what these use."""
    description = load_all(os.path.join(folder, "kustomization.yaml"))[0]
    unknown = set(description) - {"apiVersion", "kind", "namespace", "resources", "patches", "images"}
    assert not unknown, f"{folder}: {unknown}"
    objects = []
    for resource in description.get("resources", []):
        path = os.path.join(folder, resource)
        objects += kustomize(path) if os.path.isdir(path) else load_all(path)
    objects = copy.deepcopy(objects)
    for patch in description.get("patches", []):
        for change in load_all(os.path.join(folder, patch["path"])):
            hits = [i for i, each in enumerate(objects) if (each["kind"], each["metadata"]["name"]) == (change["kind"], change["metadata"]["name"])]
            assert len(hits) == 1, f"{patch['path']} changes {len(hits)} objects"
            objects[hits[0]] = merge(objects[hits[0]], change)
    for each in objects:
        if each["kind"] != "Namespace":
            each["metadata"]["namespace"] = description["namespace"]
        for container in each.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            for image in description.get("images", []):
                if container["image"] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


KUBERNETES = os.path.join(DEPLOY, "kubernetes")
OVERLAYS = ["base", "overlays/demo", "overlays/gpu", "overlays/monitoring"]


class KubernetesTest(unittest.TestCase):
    def objects(self, overlay):
        return kustomize(os.path.join(KUBERNETES, overlay))

    def named(self, objects, wanted):
        return {each["metadata"]["name"]: each for each in objects if each["kind"] == wanted}

    def test_every_key_is_known_and_of_its_type(self):
        for overlay in OVERLAYS:
            for each in self.objects(overlay):
                self.assertIn(each["kind"], KINDS)
                jsonschema.validate(each, KINDS[each["kind"]])

    def test_an_unknown_key_is_found(self):
        bad = copy.deepcopy(self.named(self.objects("base"), "Deployment")["efla"])
        bad["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
        with self.assertRaises(jsonschema.ValidationError):
            jsonschema.validate(bad, KINDS["Deployment"])

    def test_a_wrong_rule_is_found(self):
        for change in (lambda alert: alert.update(expression="1"), lambda alert: alert.pop("expr"),
                       lambda alert: alert.update({"for": "5 minutes"}), lambda alert: alert.update(record="efla:x"),
                       lambda alert: alert["labels"].update(severity=1)):
            bad = copy.deepcopy(self.named(self.objects("overlays/monitoring"), "PrometheusRule")["efla-rules"])
            jsonschema.validate(bad, KINDS["PrometheusRule"])
            change(bad["spec"]["groups"][-1]["rules"][0])
            with self.assertRaises(jsonschema.ValidationError):
                jsonschema.validate(bad, KINDS["PrometheusRule"])

    @staticmethod
    def make_rules(deploy, *arguments):
        script = os.path.join(deploy, "prometheus", "make_rules.py")
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)

    def test_the_operators_rules_are_prometheus_own(self):
        result = self.make_rules(DEPLOY, "--check")
        self.assertEqual(result.returncode, 0, result.stderr)
        groups = self.named(self.objects("overlays/monitoring"), "PrometheusRule")["efla-rules"]["spec"]["groups"]
        self.assertEqual(groups, load("prometheus", "recording.yml")["groups"] + load("prometheus", "alerts.yml")["groups"])
        self.assertEqual(len({group["name"] for group in groups}), len(groups), "the operator keys groups by their names")
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            yaml.safe_dump({"groups": groups}, file)
            file.flush()
            result = subprocess.run(["promtool", "check", "rules", file.name], capture_output=True, text=True)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_a_changed_alert_is_missed_in_the_operators_rules(self):
        made = os.path.join("kubernetes", "overlays", "monitoring", "rules.yaml")
        with tempfile.TemporaryDirectory() as scratch:
            for path in ("prometheus/make_rules.py", "prometheus/recording.yml", "prometheus/alerts.yml", made):
                os.makedirs(os.path.dirname(os.path.join(scratch, path)), exist_ok=True)
                shutil.copy(os.path.join(DEPLOY, path), os.path.join(scratch, path))

            def change(path, old, new):
                with open(os.path.join(scratch, path), "r+", encoding="utf-8") as file:
                    text = file.read()
                    self.assertIn(old, text)
                    file.seek(0)
                    file.truncate()
                    file.write(text.replace(old, new))
            self.assertEqual(self.make_rules(scratch, "--check").returncode, 0)
            for path, old, new in (("prometheus/alerts.yml", "efla_queue_age_seconds > 5", "efla_queue_age_seconds > 6"),
                                   ("prometheus/recording.yml", "efla:load_ratio", "efla:loads"),
                                   (made, "severity: page", "severity: ticket")):
                change(path, old, new)
                self.assertEqual(self.make_rules(scratch, "--check").returncode, 1, path)
                self.assertEqual(self.make_rules(scratch).returncode, 0)
                self.assertEqual(self.make_rules(scratch, "--check").returncode, 0, path)
            with open(os.path.join(scratch, made), encoding="utf-8") as file:
                rules = file.read()
            for wanted in ("efla_queue_age_seconds > 6", "efla:loads", "severity: page"):
                self.assertIn(wanted, rules)
            change("prometheus/alerts.yml", "groups:\n", "group:\n")
            self.assertNotEqual(self.make_rules(scratch).returncode, 0)

    def test_the_operators_targets_are_of_the_job_that_the_rules_ask_for(self):
        """The operator makes the job from the pod's label that jobLabel names, and adds four labels to every target."""
        monitor = self.named(self.objects("overlays/monitoring"), "PodMonitor")["efla"]
        jobs = set(re.findall(r'job="(.*?)"', read("deploy", "prometheus", "alerts.yml") + read("deploy", "prometheus", "recording.yml")))
        self.assertEqual(len(jobs), 1)
        self.assertIn(*jobs, [each["job_name"] for each in load("prometheus", "prometheus.yml")["scrape_configs"]])
        for overlay in OVERLAYS[:3]:
            objects = self.objects(overlay)
            pods = [deployment["spec"]["template"] for deployment in self.named(objects, "Deployment").values()]
            pod, = [pod for pod in pods if monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()]
            self.assertEqual({pod["metadata"]["labels"][monitor["spec"]["jobLabel"]]}, jobs)
            namespaces = {each["metadata"]["namespace"] for each in objects if "namespace" in each["metadata"]}
            self.assertEqual(namespaces, {monitor["metadata"]["namespace"]})
            ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                self.assertIn(endpoint["port"], ports)
        for name, metric in json.loads(read("deploy", "prometheus", "metrics.json")).items():
            self.assertFalse({"namespace", "pod", "container", "endpoint"} & set(metric["labels"]), name)

    def test_selectors_ports_and_mounts_have_their_other_ends(self):
        for overlay in OVERLAYS[:3]:
            objects = self.objects(overlay)
            deployments = self.named(objects, "Deployment")
            pods = [d["spec"]["template"] for d in deployments.values()]

            def selected(labels):
                return [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
            for deployment in deployments.values():
                self.assertEqual(len(selected(deployment["spec"]["selector"]["matchLabels"])), 1)
                pod = deployment["spec"]["template"]["spec"]
                volumes = {volume["name"] for volume in pod["volumes"]}
                for container in pod["containers"]:
                    self.assertEqual({mount["name"] for mount in container["volumeMounts"]}, volumes)
                    ports = {port["name"] for port in container["ports"]}
                    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                        for action in (container.get(probe) or {}).values():
                            if isinstance(action, dict):
                                self.assertIn(action["port"], ports)
                for constraint in pod.get("topologySpreadConstraints", []):
                    self.assertEqual(constraint["labelSelector"], deployment["spec"]["selector"])
            for service in self.named(objects, "Service").values():
                pod, = selected(service["spec"]["selector"])
                ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
                for port in service["spec"]["ports"]:
                    self.assertIn(port["targetPort"], ports)
            for name in ("PodDisruptionBudget", "NetworkPolicy"):
                for each in self.named(objects, name).values():
                    labels = each["spec"].get("selector", each["spec"].get("podSelector"))["matchLabels"]
                    self.assertEqual(len(selected(labels)), 1)
            scaler = self.named(objects, "HorizontalPodAutoscaler")["efla"]["spec"]
            self.assertIn(scaler["scaleTargetRef"]["name"], deployments)
            with open(os.path.join(DEPLOY, "prometheus", "metrics.json"), encoding="utf-8") as file:
                table = json.load(file)
            for metric in scaler["metrics"]:
                self.assertEqual(table[metric["pods"]["metric"]["name"]]["type"], "gauge")

    def test_pods_pass_the_restricted_standard_and_leave_time_to_drain(self):
        for overlay in OVERLAYS[:3]:
            for deployment in self.named(self.objects(overlay), "Deployment").values():
                pod = deployment["spec"]["template"]["spec"]
                self.assertTrue(pod["securityContext"]["runAsNonRoot"])
                self.assertEqual(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault")
                for container in pod["containers"]:
                    self.assertFalse(container["securityContext"]["allowPrivilegeEscalation"])
                    self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"])
                    self.assertEqual(container["securityContext"]["capabilities"]["drop"], ["ALL"])
            server = self.named(self.objects(overlay), "Deployment")["efla"]["spec"]["template"]["spec"]
            flags = dict(flag[2:].split("=", 1) for flag in server["containers"][0]["args"])
            needed = float(flags["drain-delay"]) + float(flags["drain-timeout"]) + 5
            self.assertGreater(server["terminationGracePeriodSeconds"], needed + 10)
            options = read("server", "options.cc")
            for flag in flags:
                self.assertIn(f'"{flag}"', options)
            running = self.named(self.objects(overlay), "HorizontalPodAutoscaler")["efla"]["spec"]["metrics"][0]
            self.assertLess(int(running["pods"]["target"]["averageValue"]), int(flags["state-slots"]))

    def test_the_merge_is_kubectls_where_there_is_one(self):
        if shutil.which("kubectl") is None:
            self.skipTest("kubectl is not installed")
        for overlay in OVERLAYS:
            result = subprocess.run(["kubectl", "kustomize", os.path.join(KUBERNETES, overlay)], capture_output=True, text=True)
            self.assertEqual(result.returncode, 0, result.stderr)
            key = lambda each: (each["kind"], each["metadata"]["name"])
            theirs = sorted((each for each in yaml.safe_load_all(result.stdout)), key=key)
            ours = sorted(self.objects(overlay), key=key)

            def sorted_lists(value):
                if isinstance(value, dict):
                    return {k: sorted_lists(v) for k, v in value.items()}
                if isinstance(value, list):
                    return sorted((sorted_lists(v) for v in value), key=lambda v: json.dumps(v, sort_keys=True))
                return value
            self.assertEqual(sorted_lists(ours), sorted_lists(theirs), overlay)


# ---- systemd ----

class SystemdTest(unittest.TestCase):
    EXECUTABLE = "/opt/efla/bin/efla_server"

    def analyze(self, text, *arguments):
        """What systemd-analyze says to a unit of this text, its programs replaced by one that is on every machine."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "efla.service")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text.replace(self.EXECUTABLE, "/bin/true").replace("/bin/kill ", "/bin/true "))
            return subprocess.run(["systemd-analyze", *arguments, path], capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def verify(self, text):
        return self.analyze(text, "verify", "--man=no", "--recursive-errors=no")

    def exposure(self, text):
        """Fails above 4.0 of 10 (most exposed); the unit is 3.9."""
        return self.analyze(text, "security", "--offline=true", "--threshold=40", "--no-pager")

    def test_the_unit_is_valid_and_closed(self):
        unit = read("deploy", "systemd", "efla.service")
        self.assertIn(f"ExecStart={self.EXECUTABLE} ", unit)
        for result in (self.verify(unit), self.exposure(unit)):
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(self.verify(unit).stderr, "")

    def test_a_broken_unit_is_found(self):
        good = read("deploy", "systemd", "efla.service")
        for old, new, said in (("ProtectHome=", "ProtectHomes=", "ProtectHomes"), ("WantedBy=", "WantdBy=", "WantdBy"),
                               ("Restart=on-failure", "Restart=on-fail", "on-fail"), ("TimeoutStopSec=90", "TimeoutStopSec=90x", "90x"),
                               ("[Service]", "[Server]", "Server"), ("[Service]\n", "[Service]\nMaxSessions=5\n", "MaxSessions"),
                               (self.EXECUTABLE, "/bin/no-such-program", "no-such-program")):
            self.assertIn(old, good)
            result = self.verify(good.replace(old, new))
            self.assertNotEqual(result.returncode, 0, new)
            self.assertIn(said, result.stderr)
        self.assertNotEqual(self.exposure(good.replace("CapabilityBoundingSet=\n", "")).returncode, 0)

    def test_what_it_says_of_the_server_is_so(self):
        unit = read("deploy", "systemd", "efla.service")
        check_flags(self, re.search(r"^ExecStart=(.*)$", unit, re.M)[1].split())
        state = re.search(r"^StateDirectory=(.*)$", unit, re.M)[1]
        self.assertIn(f" --session-dir /var/lib/{state}/", unit, "the only folder it may write to")
        options = read("server", "options.cc")
        bad_usage = re.search(r"kBadUsage = (\d+)", options)[1]
        self.assertIn(f"\nRestartPreventExitStatus={bad_usage}\n", unit)
        drain = int(re.search(r"drain_seconds = (\d+)", options)[1])
        self.assertGreaterEqual(int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)[1]), drain + 5 + 10)


# ---- Envoy ----

# The fields of the v3 messages that are used, by message; "*" maps any key. What a typed_config holds goes by its @type.
DURATION = {"type": "string", "pattern": r"^\d+(\.\d+)?s$"}
UINT = {"type": "integer", "minimum": 0}
VALUE = obj(["value"], value={"type": "number"})
SOCKET = obj(["socket_address"], socket_address=obj(["address", "port_value"], address=STRING, port_value=UINT))
KEEPALIVE = obj(interval=DURATION, timeout=DURATION)
H2 = obj(max_concurrent_streams=UINT, initial_stream_window_size={"type": "integer", "minimum": 65535}, initial_connection_window_size={"type": "integer", "minimum": 65535}, connection_keepalive=KEEPALIVE)
RETRY = obj(["retry_on"], retry_on=STRING, num_retries=UINT, host_selection_retry_max_attempts=UINT,
            retry_host_predicate=many(obj(["name", "typed_config"], name=STRING, typed_config={})), retry_back_off=obj(["base_interval"], base_interval=DURATION, max_interval=DURATION))
ROUTE = obj(["match", "route"], match=obj(prefix=STRING, safe_regex=obj(["regex"], regex=STRING)),
            route=obj(["cluster"], cluster=STRING, timeout=DURATION, idle_timeout=DURATION, max_stream_duration=obj(max_stream_duration=DURATION, grpc_timeout_header_max=DURATION),
                      hash_policy=many(obj(header=obj(["header_name"], header_name=STRING))), retry_policy=RETRY))
TYPED = {
    "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager": obj(
        ["stat_prefix", "http_filters", "route_config"], **{"@type": STRING}, stat_prefix=STRING, codec_type={"enum": ["AUTO", "HTTP1", "HTTP2", "HTTP3"]},
        stream_idle_timeout=DURATION, request_timeout=DURATION, drain_timeout=DURATION, common_http_protocol_options=obj(idle_timeout=DURATION, max_connection_duration=DURATION),
        http2_protocol_options=H2, http_filters=many(obj(["name", "typed_config"], name=STRING, typed_config={})),
        route_config=obj(name=STRING, virtual_hosts=many(obj(["name", "domains", "routes"], name=STRING, domains=many(STRING), routes=many(ROUTE))))),
    "envoy.extensions.filters.http.grpc_stats.v3.FilterConfig": obj(**{"@type": STRING}, emit_filter_state=BOOL, individual_method_stats_allowlist=obj(
        services=many(obj(["name", "method_names"], name=STRING, method_names=many(STRING))))),
    "envoy.extensions.filters.http.router.v3.Router": obj(**{"@type": STRING}),
    "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate": obj(**{"@type": STRING}),
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": obj(**{"@type": STRING}, explicit_http_config=obj(http2_protocol_options=H2)),
}
CLUSTER = obj(
    ["name", "load_assignment"], name=STRING, type={"enum": ["STATIC", "STRICT_DNS", "LOGICAL_DNS", "EDS"]}, dns_refresh_rate=DURATION, connect_timeout=DURATION,
    lb_policy={"enum": ["ROUND_ROBIN", "LEAST_REQUEST", "RING_HASH", "MAGLEV"]}, ring_hash_lb_config=obj(minimum_ring_size=UINT, maximum_ring_size=UINT),
    common_lb_config=obj(consistent_hashing_lb_config=obj(use_hostname_for_hashing=BOOL, hash_balance_factor={"type": "integer", "minimum": 100}), healthy_panic_threshold=VALUE),
    typed_extension_protocol_options={"type": "object"},
    circuit_breakers=obj(thresholds=many(obj(max_connections=UINT, max_pending_requests=UINT, max_requests=UINT, retry_budget=obj(budget_percent=VALUE, min_retry_concurrency=UINT)))),
    outlier_detection=obj(consecutive_5xx=UINT, interval=DURATION, base_ejection_time=DURATION, max_ejection_percent=UINT),
    health_checks=many(obj(["timeout", "interval", "unhealthy_threshold", "healthy_threshold", "grpc_health_check"], timeout=DURATION, interval=DURATION, no_traffic_interval=DURATION,
                           unhealthy_threshold=UINT, healthy_threshold=UINT, grpc_health_check=obj(service_name=STRING))),
    load_assignment=obj(["cluster_name", "endpoints"], cluster_name=STRING, endpoints=many(obj(lb_endpoints=many(obj(endpoint=obj(["address"], hostname=STRING, address=SOCKET)))))))
BOOTSTRAP = obj(["static_resources"], admin=obj(address=SOCKET), static_resources=obj(
    listeners=many(obj(["name", "address", "filter_chains"], name=STRING, address=SOCKET, per_connection_buffer_limit_bytes=UINT,
                       filter_chains=many(obj(filters=many(obj(["name", "typed_config"], name=STRING, typed_config={})))))),
    clusters=many(CLUSTER)))
RETRY_ON = {"unavailable", "refused-stream", "connect-failure", "reset-before-request"}


class EnvoyTest(unittest.TestCase):
    """There is no Envoy in Debian: what cannot be loaded is read against the fields of its messages, written down above. run.sh --long
    decodes it with Envoy's own protos."""

    def walk(self, value):
        if isinstance(value, dict):
            yield value
            for each in value.values():
                yield from self.walk(each)
        elif isinstance(value, list):
            for each in value:
                yield from self.walk(each)

    def check(self, bootstrap):
        jsonschema.validate(bootstrap, BOOTSTRAP)
        for each in self.walk(bootstrap):
            if "@type" in each:
                jsonschema.validate(each, TYPED[each["@type"].removeprefix("type.googleapis.com/")])

    def test_every_field_is_one_of_envoys(self):
        self.check(load("envoy.yaml"))
        self.assertNotIn("<<", read("deploy", "envoy.yaml"), "Envoy's YAML has no merge keys")

    def test_a_wrong_field_is_found(self):
        for change in (lambda b: b["static_resources"]["clusters"][0].update(lb_polisy="MAGLEV"),
                       lambda b: b["static_resources"]["clusters"][0].update(lb_policy="RING"),
                       lambda b: b["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"].update(stream_idle_timeout=5)):
            bootstrap = load("envoy.yaml")
            change(bootstrap)
            with self.assertRaises(jsonschema.ValidationError):
                self.check(bootstrap)

    def test_clusters_services_and_regexes_have_their_other_ends(self):
        bootstrap = load("envoy.yaml")["static_resources"]
        clusters = {cluster["name"] for cluster in bootstrap["clusters"]}
        for cluster in bootstrap["clusters"]:
            self.assertEqual(cluster["load_assignment"]["cluster_name"], cluster["name"])
            self.assertIn("envoy.extensions.upstreams.http.v3.HttpProtocolOptions", cluster["typed_extension_protocol_options"])
        manager = bootstrap["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        self.assertEqual(manager["http_filters"][-1]["name"], "envoy.filters.http.router")
        routes = manager["route_config"]["virtual_hosts"][0]["routes"]
        for route in routes:
            self.assertIn(route["route"]["cluster"], clusters)
            self.assertEqual(route["route"]["timeout"], "0s", "a stream is no request of fifteen seconds")
            self.assertEqual(route["route"]["hash_policy"][0]["header"]["header_name"], "x-session-id")
            self.assertLessEqual(set(route["route"]["retry_policy"]["retry_on"].split(",")), RETRY_ON)
        safe = re.compile(routes[0]["match"]["safe_regex"]["regex"])
        methods = re.findall(r"rpc (\w+)\(", read("proto", "efla", "v1", "generation.proto"))
        self.assertLessEqual({"Generate", "Complete", "Score"}, set(methods))
        for method in methods:
            self.assertEqual(bool(safe.fullmatch(f"/efla.v1.Generation/{method}")), method in ("Generate", "Score"), method)
        for method in re.findall(r"rpc (\w+)\(", read("proto", "efla", "v1", "sessions.proto")):
            self.assertIsNone(safe.fullmatch(f"/efla.v1.Sessions/{method}"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv, verbosity=1)
