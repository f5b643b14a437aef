#!/usr/bin/env bash
# Builds the server and the client, serves the demonstration model and streams a story from it.
#
#   deploy/demo.sh [PROMPT] [--serve]
#
# For Debian 12. Installs missing packages (as root or through sudo), builds into build/release, serves model/demo
# on free ports, streams a continuation of PROMPT and stops the server. --serve keeps it until Ctrl-C.
set -euo pipefail

prompt="Once upon a time there was a"
serve=no
for argument in "$@"; do
  case "$argument" in
    --serve) serve=yes ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "demo.sh: unknown option $argument; see $0 --help" >&2; exit 2 ;;
    *) prompt="$argument" ;;
  esac
done

root="$(dirname "$(dirname "$(readlink -f "$0")")")"
cd "$root"
work=$(mktemp -d)
server_pid=""

stop_server() {
  [ -n "$server_pid" ] || return 0
  kill -TERM "$server_pid" 2>/dev/null || true
  wait "$server_pid" 2>/dev/null || true
  server_pid=""
}
# shellcheck disable=SC2317  # called by the trap
clean_up() {
  trap '' INT TERM
  stop_server
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

deploy/install_packages.sh build

echo "Building into build/release (the first time takes some minutes)"
if ! cmake --preset release >"$work/configure.log" 2>&1; then
  cat "$work/configure.log" >&2
  echo "demo.sh: cmake --preset release failed; its output is above" >&2
  exit 1
fi
targets=(efla_server efla)
if [ -e /dev/nvidiactl ] && cmake --build --preset release --target help | grep '^efla_cuda:' >/dev/null; then
  targets+=(efla_cuda)
fi
cmake --build --preset release --parallel "$(deploy/build_jobs.sh)" --target "${targets[@]}"
bin="$root/build/release/bin"

# In a session of its own, so that Ctrl-C reaches this script alone and the server ends by SIGTERM, drained.
setsid "$bin/efla_server" --checkpoint model/demo --listen 127.0.0.1:0 --admin 127.0.0.1:0 \
  >"$work/server.out" 2>"$work/server.log" &
server_pid=$!
ready=""
for _ in $(seq 600); do
  ready=$(grep -m 1 '^efla_server ready ' "$work/server.out" || true)
  [ -z "$ready" ] || break
  kill -0 "$server_pid" 2>/dev/null || break
  sleep 0.1
done
if [ -z "$ready" ]; then
  cat "$work/server.out" "$work/server.log" >&2
  echo "demo.sh: the server did not become ready; its output is above" >&2
  exit 1
fi
echo "$ready"
grpc=$(sed -n 's/.* grpc=\([^ ]*\).*/\1/p' <<<"$ready")
admin=$(sed -n 's/.* admin=\([^ ]*\).*/\1/p' <<<"$ready")

printf '\n%s' "$prompt"
"$bin/efla" generate --target "$grpc" --prompt "$prompt" --max-tokens 200 --temperature 0.8 --stats

if [ "$serve" = yes ]; then
  cat <<INFO

The server goes on until Ctrl-C. From another terminal, in $root:
  build/release/bin/efla generate --target $grpc --prompt "It was a dark night" --max-tokens 100
  build/release/bin/efla score --target $grpc --prompt "It was a dark night."
  build/release/bin/efla load --target $grpc --concurrency 8
  curl http://$admin/metrics
INFO
  trap 'echo; echo "Draining"; stop_server; exit 0' INT TERM
  wait "$server_pid"
fi
