#!/usr/bin/env python3
"""Proves the Dockerfile where there is no container engine: carries out its instructions in a Debian 12 made by debootstrap, one
overlay a layer, and runs what comes out as an engine would that is told --read-only --tmpfs /tmp --cap-drop ALL --security-opt
no-new-privileges.

  deploy/check_image.py [--work FOLDER] [--cuda VERSION]

A layer is named by a hash of its instruction and of all that it is made from. Those in --work stay there, and the next run takes
them up as an image builder would; so are the folders of RUN's --mount=type=cache.

--cuda VERSION (13-0, as in NVIDIA's packages) builds with that argument. With NVIDIA's cuda-keyring package in deploy/cuda/ it
uses their archive. Without, stand-ins take that archive's place, so that deploy/cuda/install.sh and the build go their whole way:
a keyring package of ours with a key of ours, and an apt archive signed by it that holds packages of NVIDIA's names and folders,
filled from this machine's toolkit of that version at /usr/local/cuda. What stays unproven then: that NVIDIA's packages divide the
toolkit as STAND_INS does, and anything on a GPU.

Another stand-in, always: the base image is debootstrap's minbase, without documentation, as debian:12-slim is.

Needs root, debootstrap, iproute2, Debian's package archive, an overlay file system; gpg for --cuda. Takes as long as a whole build.
What it understands is what the Dockerfile uses, and anything else is an error. APT_PROXY_CONFIG, if set, is a file for the made
system's /etc/apt/apt.conf.d; SOURCES_LIST replaces its sources.list; DEBIAN_MIRROR is debootstrap's.
"""
import argparse
import contextlib
import ctypes
import dataclasses
import glob
import hashlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOOLKIT = "/usr/local/cuda"
# Where the stand-in archive is seen while RUN runs: on a file system that leaves no trace in a layer.
ARCHIVE = "/dev/shm/nvidia"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Mounts at $1 what every container has, a cache folder or archive for each FROM=TO before --, and becomes the rest within.
INSIDE = """
set -eu
root=$1; shift
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do
  touch "$root/dev/$node"
  mount --bind "/dev/$node" "$root/dev/$node"
done
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"; ln -s fd/1 "$root/dev/stdout"; ln -s fd/2 "$root/dev/stderr"
mkdir -m 1777 "$root/dev/shm"
mkdir "$root/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
while [ "$1" != -- ]; do
  case "$1" in
    tmpfs=*) mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root${1#*=}" ;;
    loopback) ip link set lo up ;;
    *) mkdir -p "$root${1#*=}"; mount --bind "${1%%=*}" "$root${1#*=}" ;;
  esac
  shift
done
shift
exec chroot "$root" "$@"
"""


def run(command, **kwargs):
    return subprocess.run(command, check=True, **kwargs)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path, text, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)


def digest(*parts):
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def file_digest(path):
    """Of mode and content, as builders compare files; times are none of it."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return digest("link", os.readlink(path))
    with open(path, "rb") as file:
        return digest(stat.S_IMODE(status.st_mode), hashlib.file_digest(file, "sha256").hexdigest())


# --- The context -------------------------------------------------------------------------------------------------------------


class Ignore:
    """The rules of a .dockerignore: the last pattern that matches a path, or a folder above it, decides; ! lets in again."""

    def __init__(self, text):
        lines = [line.strip() for line in text.splitlines()]
        self.rules = [(line.startswith("!"), line.lstrip("!").strip("/")) for line in lines if line and not line.startswith("#")]
        self.expressions = [(keep, self.expression(pattern)) for keep, pattern in self.rules]

    @staticmethod
    def expression(pattern):
        result = ""
        for part in pattern.split("/"):
            if part == "**":
                result += "(?:[^/]+/)*"
            else:
                result += "".join({"*": "[^/]*", "?": "[^/]"}.get(letter, re.escape(letter)) for letter in part) + "/"
        return re.compile(result)

    def excludes(self, path):
        excluded = False
        for keep, expression in self.expressions:
            if expression.match(path + "/"):
                excluded = not keep
        return excluded

    def may_keep_below(self, folder):
        return any(keep and pattern.startswith(folder + "/") for keep, pattern in self.rules)


def context_files(root, ignore):
    """{path in the context: path on this machine} of what a builder would be sent."""
    result = {}
    for folder, folders, files in os.walk(root):
        below = os.path.relpath(folder, root)
        prefix = "" if below == "." else below + "/"
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = sorted(name for name in folders if name not in links and
                            (not ignore.excludes(prefix + name) or ignore.may_keep_below(prefix + name)))
        for name in sorted(files + links):
            if not ignore.excludes(prefix + name):
                result[prefix + name] = os.path.join(folder, name)
    return result


# --- The plan ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """One layer: a command, files of the context, or a folder of another stage."""
    text: str
    key: str
    command: str = ""
    environment: dict = dataclasses.field(default_factory=dict)
    workdir: str = "/"
    caches: tuple = ()
    files: dict = dataclasses.field(default_factory=dict)  # path in the image: path on this machine
    origin: "Stage" = None
    folders: tuple = ()  # (path in origin, path here)


@dataclasses.dataclass
class Stage:
    name: str
    key: str
    steps: list = dataclasses.field(default_factory=list)
    arguments: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    labels: dict = dataclasses.field(default_factory=dict)
    ports: list = dataclasses.field(default_factory=list)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list = dataclasses.field(default_factory=list)
    health: list = dataclasses.field(default_factory=list)
    health_times: dict = dataclasses.field(default_factory=dict)  # seconds; retries: a count
    stop_signal: str = "SIGTERM"


def instructions(text):
    """[(name, rest)], continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def expand(text, values):
    return re.sub(r"\$\{(\w+)\}", lambda match: values.get(match[1], ""), text)


def pairs(text):
    return dict(word.split("=", 1) for word in shlex.split(text))


def copied(files, sources, target):
    """{path in the image: path on this machine} for COPY's words."""
    result = {}
    for source in sources:
        name = source.rstrip("/")
        below = {path[len(name) + 1:]: real for path, real in files.items() if path.startswith(name + "/")}
        if name in files:
            into = target + os.path.basename(name) if target.endswith("/") else target
            result[into] = files[name]
        elif below:
            result.update({os.path.join(target, path): real for path, real in below.items()})
        else:
            raise SystemExit(f"COPY {source}: nothing of that name is in the context")
    return result


def plan(text, files, given):
    """[Stage] of a Dockerfile: what is to be done, and the key of each layer. given: the build's arguments."""
    stages, outer, unused = [], {}, set(given)
    for name, rest in instructions(text):
        stage = stages[-1] if stages else None
        values = {**stage.arguments, **stage.environment} if stage else outer
        if name == "ARG":
            key, _, value = shlex.split(rest)[0].partition("=")
            (stage.arguments if stage else outer)[key] = given.get(key, value)
            unused.discard(key)
        elif name == "FROM":
            image, _, alias = expand(rest, outer).partition(" AS ")
            stages.append(Stage(alias, digest(image)))
        elif name == "WORKDIR":
            stage.workdir = os.path.join(stage.workdir, expand(rest, values))
        elif name == "COPY":
            flags, words = [], expand(rest, values).split()
            while words[0].startswith("--"):
                flags.append(words.pop(0))
            sources, target = words[:-1], os.path.join(stage.workdir, words[-1])
            step = Step(f"{name} {rest}", "")
            if not flags:
                step.files = copied(files, sources, target)
                made_from = [(path, file_digest(real)) for path, real in sorted(step.files.items())]
            elif len(flags) == 1 and flags[0].startswith("--from="):
                step.origin = next(each for each in stages if each.name == flags[0][len("--from="):])
                step.folders = tuple((source, target) for source in sources)
                made_from = [step.origin.key, step.folders]
            else:
                raise SystemExit(f"COPY {flags} is not understood")
            step.key = stage.key = digest(stage.key, name, made_from)
            stage.steps.append(step)
        elif name == "RUN":
            caches = []
            while match := re.match(r"--(\S+)\s+", rest):
                options = pairs(match[1].replace(",", " "))
                if options.get("mount") != "type=cache" or set(options) != {"mount", "target"}:
                    raise SystemExit(f"RUN --{match[1]} is not understood")
                caches.append(options["target"])
                rest = rest[match.end():]
            environment = {"HOME": "/root", **stage.arguments, **stage.environment}
            stage.key = digest(stage.key, name, rest, sorted(environment.items()), caches)
            stage.steps.append(Step(f"{name} {rest}", stage.key, rest, environment, stage.workdir, tuple(caches)))
        elif name == "ENV":
            stage.environment.update(pairs(expand(rest, values)))
        elif name == "LABEL":
            stage.labels.update(pairs(expand(rest, values)))
        elif name == "USER":
            stage.user = rest
        elif name == "EXPOSE":
            stage.ports += [int(port) for port in rest.split()]
        elif name == "STOPSIGNAL":
            stage.stop_signal = rest
        elif name == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        elif name == "HEALTHCHECK":
            flags, _, command = rest.partition("CMD ")
            stage.health = json.loads(command)
            for flag, value in pairs(flags).items():
                stage.health_times[flag.lstrip("-")] = float(value.rstrip("s"))
        else:
            raise SystemExit(f"{name} is not understood")
    if unused:
        raise SystemExit(f"the Dockerfile has no argument {', '.join(sorted(unused))}")
    return stages


# --- The layers --------------------------------------------------------------------------------------------------------------


def megabytes(folder):
    return int(run(["du", "-sk", folder], capture_output=True, text=True).stdout.split()[0]) / 1024


@contextlib.contextmanager
def overlay(layers, where, upper=None):
    """The layers, lowest first, as one system at `where`; read-only without `upper`. Only this process's children see it."""
    os.makedirs(where, exist_ok=True)
    options = "lowerdir=" + ":".join(reversed(layers))
    if upper:
        scratch = upper + ".scratch"
        os.makedirs(scratch, exist_ok=True)
        options += f",upperdir={upper},workdir={scratch}"
    else:
        options += ":" + os.path.join(os.path.dirname(where), "empty") + ",ro"  # two layers are the least there may be
    run(["mount", "-t", "overlay", "-o", options, "overlay", where])
    try:
        yield where
    finally:
        run(["umount", "--lazy", where])
        if upper:
            shutil.rmtree(scratch)


class Builder:
    def __init__(self, work, archive=None):
        self.work, self.archive, self.table = work, archive, []
        for name in ("layers", "cache", "empty"):
            os.makedirs(os.path.join(work, name), exist_ok=True)

    def note(self, what, started, size, kept=False):
        self.table.append((what, None if kept else time.monotonic() - started, size))
        print(f"--- {what[:100]}: {'kept' if kept else f'{time.monotonic() - started:.0f} s'}, {size:.1f} MB", flush=True)

    def base(self):
        folder, started = os.path.join(self.work, "debian"), time.monotonic()
        kept = os.path.exists(folder)
        if not kept:
            made = folder + ".part"
            shutil.rmtree(made, ignore_errors=True)
            mirror = [os.environ["DEBIAN_MIRROR"]] if "DEBIAN_MIRROR" in os.environ else []
            run(["debootstrap", "--variant=minbase", "bookworm", made, *mirror], stdout=subprocess.DEVNULL)
            for name, end in (("APT_PROXY_CONFIG", "etc/apt/apt.conf.d/90proxy"), ("SOURCES_LIST", "etc/apt/sources.list")):
                if name in os.environ:
                    shutil.copy(os.environ[name], os.path.join(made, end))
            # As debian:12-slim does: no documentation, and no downloaded packages in a layer.
            bare = [f"/usr/share/{name}" for name in ("doc", "info", "locale", "man", "groff", "lintian", "linda")]
            write(f"{made}/etc/dpkg/dpkg.cfg.d/slim", "".join(f"path-exclude {path}/*\n" for path in bare))
            write(f"{made}/etc/apt/apt.conf.d/slim", 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; };\n')
            emptied = [*bare, "/var/lib/apt/lists", "/var/cache/apt", "/var/log"]
            for path in emptied:
                shutil.rmtree(made + path, ignore_errors=True)
                os.makedirs(made + path)
            write(f"{made}/etc/resolv.conf", "")
            os.rename(made, folder)
        self.note("FROM: debootstrap", started, megabytes(folder), kept)
        return folder

    def layer(self, step):
        return os.path.join(self.work, "layers", step.key[:16])

    def layers(self, stage):
        return [os.path.join(self.work, "debian"), *[self.layer(step) for step in stage.steps]]

    def build(self, stage):
        below = [os.path.join(self.work, "debian")]
        for step in stage.steps:
            folder, started = self.layer(step), time.monotonic()
            kept = os.path.exists(folder)
            if not kept:
                made = folder + ".part"
                shutil.rmtree(made, ignore_errors=True)
                os.makedirs(made)
                with overlay(below, os.path.join(self.work, "root"), made) as root:
                    self.carry_out(step, root)
                os.rename(made, folder)
            below.append(folder)
            self.note(f"{stage.name}: {step.text}", started, megabytes(folder), kept)

    def carry_out(self, step, root):
        if step.command:
            self.command(step, root)
        elif step.origin:
            with overlay(self.layers(step.origin), os.path.join(self.work, "from")) as origin:
                for source, target in step.folders:
                    if not os.path.isdir(origin + source):
                        raise SystemExit(f"{step.text}: {source} is no folder in {step.origin.name}")
                    shutil.copytree(origin + source, root + target, symlinks=True, dirs_exist_ok=True)
        else:
            for path, real in step.files.items():
                os.makedirs(os.path.dirname(root + path), exist_ok=True)
                shutil.copy2(real, root + path, follow_symlinks=False)
                os.chown(root + path, 0, 0, follow_symlinks=False)

    def command(self, step, root):
        mounts = []
        for target in step.caches:
            cache = os.path.join(self.work, "cache", target.strip("/").replace("/", "_"))
            os.makedirs(cache, exist_ok=True)
            mounts.append(f"{cache}={target}")
        if self.archive:
            mounts.append(f"{self.archive}={ARCHIVE}")
        os.makedirs(root + step.workdir, exist_ok=True)
        run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", INSIDE, "bash", root, *mounts, "--",
             "/usr/bin/env", "-i", f"--chdir={step.workdir}", *[f"{k}={v}" for k, v in step.environment.items()],
             "/bin/sh", "-c", step.command], stdin=subprocess.DEVNULL)


# --- Stand-ins for NVIDIA's archive ------------------------------------------------------------------------------------------

# {package, without its version: ([packages it depends on], [pattern in the toolkit])}, as NVIDIA divides it as far as it is of
# use here: cuda-crt and libnvvm are in cuda-nvcc, cuda-driver-dev in cuda-cudart-dev.
STAND_INS = {
    "cuda-toolkit-config-common": ([], []),
    "cuda-nvcc": (["cuda-toolkit-config-common"], ["bin/**", "nvvm/**", "include/crt/**", "include/fatbinary_section.h"]),
    "cuda-cccl": (["cuda-toolkit-config-common"], ["include/cccl/**"]),
    "cuda-cudart": (["cuda-toolkit-config-common"], ["lib/libcudart.so.*"]),
    "cuda-cudart-dev": (["cuda-cudart", "cuda-cccl"],
                        ["lib/libcudart.so", "lib/libcudart_static.a", "lib/libcudadevrt.a", "lib/libculibos.a",
                         "lib/stubs/libcuda.so*", "include/cuda*.h", "include/cuda*.hpp", "include/cooperative_groups*",
                         "include/cooperative_groups/**", "include/*_types.h", "include/*_functions.h",
                         "include/*_functions.hpp", "include/vector_*", "include/device_*", "include/host_*",
                         "include/surface_*", "include/texture_*", "include/driver_*", "include/library_types.h",
                         "include/channel_descriptor.h", "include/math_constants.h", "include/cuComplex.h",
                         "include/sm_*"]),
    "libcublas": (["cuda-toolkit-config-common"], ["lib/libcublas.so.*", "lib/libcublasLt.so.*", "lib/libnvblas.so.*"]),
    "libcublas-dev": (["libcublas"], ["lib/libcublas.so", "lib/libcublasLt.so", "lib/libnvblas.so", "include/cublas*.h",
                                      "include/nvblas.h"]),
}


def package_name(name, version):
    return f"cuda-toolkit-{version}-config-common" if name == "cuda-toolkit-config-common" else f"{name}-{version}"


def make_package(folder, name, number, depends, fill):
    """Returns the package's part of a Packages file."""
    with tempfile.TemporaryDirectory(dir=folder) as tree:
        os.chmod(tree, 0o755)
        fill(tree)
        control = (f"Package: {name}\nVersion: {number}\nArchitecture: all\nMaintainer: nobody <nobody@localhost>\n" +
                   (f"Depends: {', '.join(depends)}\n" if depends else "") + "Description: a stand-in\n")
        write(f"{tree}/DEBIAN/control", control)
        deb = f"{name}_{number}_all.deb"
        run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, os.path.join(folder, deb)], stdout=subprocess.DEVNULL)
    with open(os.path.join(folder, deb), "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{control}Filename: ./{deb}\nSize: {os.path.getsize(os.path.join(folder, deb))}\nSHA256: {checksum}\n"


def make_archive(work, version):
    """Makes the stand-in archive and keyring package; returns (the archive's folder, the keyring package)."""
    folder = os.path.join(work, f"nvidia-{version}")
    keyring = os.path.join(folder, "keyring", "cuda-keyring_1.1-1_all.deb")
    if os.path.exists(keyring):
        return os.path.join(folder, "archive"), keyring
    nvcc = os.path.join(TOOLKIT, "bin/nvcc")
    if not os.path.exists(nvcc):
        raise SystemExit(f"--cuda {version}: needs NVIDIA's cuda-keyring package in deploy/cuda/, or a toolkit at {TOOLKIT}")
    release = re.search(r"release (\d+)\.(\d+)", run([nvcc, "--version"], capture_output=True, text=True).stdout)
    if f"{release[1]}-{release[2]}" != version:
        raise SystemExit(f"--cuda {version}: the toolkit at {TOOLKIT} is {release[1]}-{release[2]}")
    shutil.rmtree(folder, ignore_errors=True)
    archive, home = os.path.join(folder, "archive"), os.path.join(folder, "key")
    os.makedirs(archive)
    os.makedirs(os.path.dirname(keyring))
    os.makedirs(home, mode=0o700)
    number = version.replace("-", ".")
    place = f"/usr/local/cuda-{number}"

    def fill(name):
        def into(tree):
            if name == "cuda-toolkit-config-common":
                for link, target in ((f"{place}/lib64", "targets/x86_64-linux/lib"), (f"{place}/include", "targets/x86_64-linux/include"),
                                     ("/usr/local/cuda", f"cuda-{number}")):
                    os.makedirs(os.path.dirname(tree + link), exist_ok=True)
                    os.symlink(target, tree + link)
            for pattern in STAND_INS[name][1]:
                for real in glob.glob(os.path.join(TOOLKIT, pattern), recursive=True):
                    if os.path.isdir(real):
                        continue
                    path = os.path.relpath(real, TOOLKIT)
                    within = path if path.startswith(("bin/", "nvvm/")) else "targets/x86_64-linux/" + path
                    end = f"{tree}{place}/{within}"
                    os.makedirs(os.path.dirname(end), exist_ok=True)
                    shutil.copy2(real, end, follow_symlinks=False)
        return into

    packages = [make_package(archive, package_name(name, version), f"{number}.0-1", [package_name(each, version) for each in depends],
                             fill(name)) for name, (depends, _) in STAND_INS.items()]
    write(f"{archive}/Packages", "\n".join(packages))
    listed = read(f"{archive}/Packages").encode()
    write(f"{folder}/Release", time.strftime("Date: %a, %d %b %Y %H:%M:%S UTC\n", time.gmtime()) +
          f"SHA256:\n {hashlib.sha256(listed).hexdigest()} {len(listed)} Packages\n")
    gpg = ["gpg", "--homedir", home, "--batch", "--quiet", "--yes", "--passphrase", ""]
    try:
        run([*gpg, "--quick-generate-key", "stand-in <nobody@localhost>", "rsa3072", "sign", "never"])
        run([*gpg, "--clearsign", "--output", f"{archive}/InRelease", f"{folder}/Release"])
        exported = run([*gpg, "--export"], capture_output=True).stdout
    finally:
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False)

    def fill_keyring(tree):
        ring = "/usr/share/keyrings/cuda-archive-keyring.gpg"
        os.makedirs(os.path.dirname(tree + ring))
        with open(tree + ring, "wb") as file:
            file.write(exported)
        write(f"{tree}/etc/apt/sources.list.d/cuda-debian12-x86_64.list", f"deb [signed-by={ring}] file:{ARCHIVE} /\n")
    make_package(os.path.dirname(keyring), "cuda-keyring", "1.1-1", [], fill_keyring)
    return archive, keyring


# --- What comes out ----------------------------------------------------------------------------------------------------------


def check(condition, message):
    if not condition:
        raise SystemExit(f"check_image.py: {message}")


def check_files(builder, stage, cuda):
    """The image holds the programs, all they need, nothing that compiles, and nothing that its user could change."""
    uid = int(stage.user.split(":")[0])
    for folder in builder.layers(stage)[1:]:
        for parent, folders, files in os.walk(folder):
            for name in folders + files:
                status = os.lstat(os.path.join(parent, name))
                path = os.path.join(parent, name)[len(folder):]
                if stat.S_ISLNK(status.st_mode) or path == "/tmp":
                    continue
                check(status.st_uid != uid and not status.st_mode & stat.S_IWOTH, f"{path} can be written by {stage.user}")
                check(not status.st_mode & stat.S_ISUID, f"{path} is set-user-id")
    with overlay(builder.layers(stage), os.path.join(builder.work, "root")) as root:
        programs = sorted(os.listdir(root + "/opt/efla/bin"))
        check({"efla", "efla_server"} <= set(programs), f"/opt/efla/bin has {programs}")
        check(not [name for name in programs if name.endswith("_test")], f"tests are in the image: {programs}")
        for path in ("/usr/bin/g++", "/usr/bin/cmake", "/src", "/root/.cache", "/tmp/cuda", "/usr/local/cuda/bin"):
            check(not os.path.lexists(root + path), f"{path} is in the image")
        for path in ("LICENSE", "README.md", "demo/model.safetensors", "demo/config.json"):
            check(os.path.exists(f"{root}/opt/efla/share/efla/{path}"), f"share/efla/{path} is not in the image")
        module = os.path.exists(root + "/opt/efla/lib/libefla_cuda.so")
        check(module == bool(cuda), f"the CUDA module is {'' if module else 'not '}in the image")
        for file in sorted(glob.glob(root + "/opt/efla/bin/*") + glob.glob(root + "/opt/efla/lib/libefla_*.so")):
            path = file[len(root):]
            listed = run(["chroot", root, "/usr/bin/env", "-i", "LC_ALL=C", "ldd", path], capture_output=True, text=True).stdout
            check("not found" not in listed, f"{path} lacks libraries:\n{listed}")
            if path.endswith("/libefla_cuda.so"):
                print(f"{path} is linked to:\n{listed}", end="")
                check(re.search(r"libcublasLt\.so\.\d+ => /usr/local/cuda", listed), "cuBLAS does not come from NVIDIA's package")
    return programs


def check_configuration(stage):
    check(re.fullmatch(r"[1-9]\d*:[1-9]\d*", stage.user), f"the user is {stage.user}; it must be two numbers above 0")
    version = re.search(r"project\(efla VERSION (\S+)", read(os.path.join(ROOT, "CMakeLists.txt")))[1]
    wanted = {"title": "efla", "version": version, "licenses": "Apache-2.0"}
    for name, value in wanted.items():
        found = stage.labels.get(f"org.opencontainers.image.{name}")
        check(found == value, f"the label {name} is {found!r}; it must be {value!r}")
    check(stage.labels.get("org.opencontainers.image.description"), "the image has no description")
    check(not set(stage.environment) & {"CUDA", "VERSION"}, "build arguments are in the image's environment")
    return stage.labels


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


class Container:
    """The image's program, as the one process of its own system on a read-only root without capabilities."""

    def __init__(self, stage, root, log, *words):
        self.stage, self.root = stage, root
        self.log = open(log, "w+", encoding="utf-8")
        self.outer = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child", "bash", "-c", INSIDE, "bash", root,
             "tmpfs=/tmp", "loopback", "--", *self.as_user(), *stage.entrypoint, *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, text=True)

    def as_user(self):
        user, group = self.stage.user.split(":")
        return ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
                "--ambient-caps=-all", "--no-new-privs", "/usr/bin/env", "-i", f"--chdir={self.stage.workdir}",
                *[f"{key}={value}" for key, value in self.stage.environment.items()]]

        self.pid = None  # the program's on this machine; in the container it is 1

    def child(self):
        children = read(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").split()
        return int(children[0]) if children else None

    def wait_for_line(self, seconds):
        """Returns the program's first line of output."""
        ready, _, _ = select.select([self.outer.stdout], [], [], seconds)
        self.pid = self.child()
        text = self.outer.stdout.readline() if ready else ""
        check(text and self.pid, f"no line of output in {seconds} s; log:\n{self.logged()}")
        return text

    def execute(self, *words, seconds=60):
        """As `docker exec`."""
        return subprocess.run(["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--",
                               *self.as_user(), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
                              check=False)

    def healthy(self):
        try:
            return self.execute(*self.stage.health, seconds=self.stage.health_times["timeout"]).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def kill(self):
        if self.outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child() or self.outer.pid, signal.SIGKILL)  # --kill-child does not survive a change of user
            self.outer.wait()

    def logged(self):
        self.log.flush()
        return read(self.log.name)


def check_confinement(container):
    user, group = container.stage.user.split(":")
    status = dict(line.split(":\t", 1) for line in read(f"/proc/{container.pid}/status").splitlines() if ":\t" in line)
    check(status["NSpid"].split()[-1] == "1", f"it is process {status['NSpid']}, not 1")
    check(status["Uid"].split() == [user] * 4 and status["Gid"].split() == [group] * 4 and not status["Groups"].strip(),
          f"it runs as {status['Uid']} : {status['Gid']} with groups {status['Groups']}")
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        check(int(status[name], 16) == 0, f"{name} is {status[name]}")
    check(status["NoNewPrivs"] == "1", "it may gain privileges")
    writable = set()
    for line in read(f"/proc/{container.pid}/mountinfo").splitlines():
        where, options = line.split()[4:6]
        if "rw" in options.split(","):
            writable.add(where)
    allowed = {"/tmp", "/proc", "/dev", "/etc/resolv.conf"}
    beyond = {where for where in writable if where not in allowed and not where.startswith("/dev/")}
    check(not beyond, f"mounted read-write: {beyond}")
    for path in ("/x", "/opt/efla/x", "/var/x", "/etc/resolv.conf", "/dev/x"):
        tried = container.execute("/bin/sh", "-c", f"echo x >> {path}")
        check(tried.returncode != 0, f"{path} could be written")
    check(container.execute("/bin/sh", "-c", "echo x > /tmp/x && rm /tmp/x").returncode == 0, "/tmp cannot be written")


def check_serving(builder, stage):
    """Starts the image, waits until its health check passes, asks for a completion, and ends it as an engine would. Returns
    [(what, seconds)]."""
    times = []
    with overlay(builder.layers(stage), os.path.join(builder.work, "root")) as root:
        started = time.monotonic()
        container = Container(stage, root, os.path.join(builder.work, "server.log"))
        try:
            line = container.wait_for_line(stage.health_times["start-period"])
            check(line.startswith("efla_server ready"), f"the first line is {line!r}")
            times.append(("start to ready", time.monotonic() - started))
            while not container.healthy():
                check(time.monotonic() - started < stage.health_times["start-period"], f"not healthy; log:\n{container.logged()}")
                time.sleep(0.1)
            times.append(("start to healthy", time.monotonic() - started))
            check_confinement(container)

            asked = time.monotonic()
            reply = container.execute("/opt/efla/bin/efla", "generate", "--prompt", "Once upon a time", "--max-tokens", "12")
            check(reply.returncode == 0 and len(reply.stdout.strip()) > 10, f"generate: {reply}")
            times.append(("efla generate, 12 tokens", time.monotonic() - asked))
            print("completion:", reply.stdout.strip())
            for port in stage.ports:
                reached = container.execute("/bin/bash", "-c", f"echo > /dev/tcp/127.0.0.1/{port}")
                check(reached.returncode == 0, f"nothing listens on the exposed port {port}")
            left = container.execute("/bin/ls", "-A", "/tmp").stdout.split()
            print("left in /tmp:", *(left or ["nothing"]))

            ended = time.monotonic()
            os.kill(container.pid, getattr(signal, stage.stop_signal))
            time.sleep(0.5)
            check(not container.healthy(), "its health check passes while it drains")
            code = container.outer.wait(60)
            check(code == 0, f"exit status {code}; log:\n{container.logged()}")
            times.append((f"{stage.stop_signal} to exit 0", time.monotonic() - ended))
        finally:
            container.kill()
        for line in container.logged().splitlines():
            check(is_object(line), f"a line of the log is no JSON object: {line}")
    return times


def check_module(builder, stage):
    """The CUDA module opens with what the image holds: without a GPU it comes as far as asking for one."""
    with overlay(builder.layers(stage), os.path.join(builder.work, "root")) as root:
        container = Container(stage, root, os.path.join(builder.work, "module.log"), "--device", "cuda")
        try:
            code = container.outer.wait(120)
        finally:
            container.kill()
        check(code == 1 and "finding a GPU" in container.logged(), f"--device cuda: exit status {code}; log:\n{container.logged()}")
        print(f"--device cuda: {container.logged().splitlines()[-1]}")


def print_table(builder, stage, times):
    print(f"\n{'seconds':>8} {'MB':>8}  step")
    for what, seconds, size in builder.table:
        print(f"{'kept' if seconds is None else f'{seconds:.1f}':>8} {size:8.1f}  {what[:110]}")
    sizes = [megabytes(folder) for folder in builder.layers(stage)]
    print(f"{'':8} {sum(sizes):8.1f}  the image: {sizes[0]:.1f} base, {sum(sizes[1:]):.1f} above it")
    for what, seconds in times:
        print(f"{seconds:8.1f} {'':8}  {what}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", help="folder for the layers, which stay; a temporary one if left out")
    parser.add_argument("--cuda", metavar="VERSION", default="", help="the build argument CUDA, as 13-0")
    flags = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("check_image.py: needs root for mounts and chroot")
    if flags.cuda and not re.fullmatch(r"\d+-\d+", flags.cuda):
        raise SystemExit(f"--cuda is {flags.cuda!r}; it must be a version as in NVIDIA's packages, 13-0")
    os.umask(0o022)
    # Mounts of its own, which go with it however it ends.
    new_mounts = 0x00020000
    if ctypes.CDLL(None, use_errno=True).unshare(new_mounts) != 0:
        raise SystemExit(f"check_image.py: unshare: {os.strerror(ctypes.get_errno())}")
    run(["mount", "--make-rprivate", "/"])
    work = os.path.abspath(flags.work) if flags.work else tempfile.mkdtemp(prefix="efla_image.")
    os.makedirs(work, exist_ok=True)
    started = time.monotonic()
    try:
        files = context_files(ROOT, Ignore(read(os.path.join(ROOT, ".dockerignore"))))
        archive = None
        if flags.cuda and not any(re.fullmatch(r"deploy/cuda/cuda-keyring_.*_all\.deb", path) for path in files):
            archive, keyring = make_archive(work, flags.cuda)
            files["deploy/cuda/" + os.path.basename(keyring)] = keyring
            print("stand-ins take the place of NVIDIA's archive")
        stages = plan(read(os.path.join(ROOT, "Dockerfile")), files, {"CUDA": flags.cuda})
        builder = Builder(work, archive)
        builder.base()
        for stage in stages:
            builder.build(stage)
        image = stages[-1]
        print("labels:", json.dumps(check_configuration(image)), flush=True)
        print("programs:", *check_files(builder, image, flags.cuda), flush=True)
        if flags.cuda:
            check_module(builder, image)
        print_table(builder, image, check_serving(builder, image))
    finally:
        if not flags.work:
            shutil.rmtree(work, ignore_errors=True)
    print(f"the image's steps work: {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
