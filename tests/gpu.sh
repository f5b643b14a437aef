#!/usr/bin/env bash
# The checks and benchmarks that need a GPU, from an installed bundle, on a machine with a driver and the CUDA libraries
# but no packages.
#
#   cmake --preset cuda && cmake --build --preset cuda && cmake --install build/cuda --prefix BUNDLE
#   tests/gpu.sh BUNDLE [OUT]        logs and JSON go to OUT (default: a new folder below /tmp)
#
# EFLA_GPU_STAGES picks among: ops golden server sanitize drift bench sessions load.
# compute-sanitizer is used where it is found.
# Where there is no GPU, the tests say that they were skipped and the status is 0. The last lines are a short table.
set -uo pipefail

bundle=$(readlink -f "${1:?usage: gpu.sh BUNDLE [OUT]}")
out=${2:-$(mktemp -d /tmp/efla-gpu.XXXXXX)}
mkdir -p "$out"
out=$(readlink -f "$out")
cd "$(dirname "$(dirname "$(readlink -f "$0")")")" || exit 1
export EFLA_TEST_SOURCE_DIR=$PWD EFLA_TEST_BIN_DIR=$bundle/bin EFLA_TEST_DEVICE=cuda
stages=${EFLA_GPU_STAGES:-ops golden server sanitize drift bench sessions load}
table=()
status=0

has() { [[ " $stages " == *" $1 "* ]]; }

# row NAME COMMAND...: runs it with a time limit, keeps its output, notes how it ended.
row() {
  local name=$1 start=$SECONDS code=0
  shift
  timeout "${limit:-240}" "$@" >"$out/$name.log" 2>&1 || code=$?
  local summary
  summary=$(sed -n 's/^\[  \(PASSED\|SKIPPED\|FAILED\)  *\] \([0-9]* tests\?\).*/\1 \2/p; s/^========= \(ERROR SUMMARY.*\|RACECHECK SUMMARY.*\)/\1/p' \
    "$out/$name.log" | paste -sd' ')
  table+=("$(printf '%-22s %-4s %4d s  %s' "$name" "$([ $code -eq 0 ] && echo ok || echo "rc=$code")" \
    $((SECONDS - start)) "$summary")")
  [ $code -eq 0 ] || status=1
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU: the tests are skipped"

if has ops; then
  row kernels "$bundle/bin/device_ops_test" --gtest_filter='*/cuda*'
fi
if has golden; then
  row golden "$bundle/bin/golden_test" --gtest_filter='*cuda*'
  row demo "$bundle/bin/demo_test" --gtest_filter='*cuda*'
  row exactness "$bundle/bin/exactness_test" --gtest_filter='*cuda*'
  row engine_states "$bundle/bin/engine_state_test"
  row prefix_cache "$bundle/bin/engine_prefix_cache_test"
  row engine "$bundle/bin/engine_test"
  row engine_exactness "$bundle/bin/engine_exactness_test"
  row sampling "$bundle/bin/engine_sampling_test"
  row branches "$bundle/bin/branched_generation_test"
fi
if ! nvidia-smi -L >/dev/null 2>&1; then
  printf '%s\n' "" "${table[@]}"
  exit $status
fi
if has server; then
  row server "$bundle/bin/e2e_server_test"
  limit=600 row sessions "$bundle/bin/e2e_sessions_test"
  row contract "$bundle/bin/e2e_contract_test"
  row constraints "$bundle/bin/e2e_constraint_test"
  row 10000_calls "$bundle/bin/e2e_chaos_test"
fi
if has sanitize && command -v compute-sanitizer >/dev/null; then
  ops='*FormMatchesTheReference/cudaEfla:*FormMatchesTheReference/cudaGatedDeltaNet:*AmongEqual*/cuda:*EveryRow*/cudaF16Hidden584'
  for tool in memcheck racecheck; do
    limit=${EFLA_GPU_SANITIZE_SECONDS:-400} row "$tool" compute-sanitizer --tool $tool --error-exitcode 9 "$bundle/bin/device_ops_test" \
      --gtest_filter="${EFLA_GPU_SANITIZE_FILTER:-$ops}"
  done
fi
if has drift; then
  for type in efla gated_efla delta_net gated_deltanet; do
    row "drift_$type" "$bundle/bin/drift_bench" --device cuda --type $type --json "$out/drift_$type.json"
    cat "$out/drift_$type.log"
  done
fi
if has bench; then
  limit=300 row device_bench "$bundle/bin/device_bench" --device cuda
  for preset in 340m 1.3b; do
    limit=300 row "bench_$preset" "$bundle/bin/efla_bench" --device cuda --preset $preset --decode-batches 1 8 32 64 128 256 \
      --prefill-lengths 2048 8192 32768 --max-batch-tokens 16384 --json "$out/bench_$preset.json"
    cat "$out/bench_$preset.log"
  done
fi
if has sessions; then
  for preset in 340m 1.3b; do
    limit=300 row "session_bench_$preset" "$bundle/bin/session_bench" --device cuda --preset $preset --slots 64 \
      --host-bytes 4GiB --idle 200 --session-dir "$out" --json "$out/session_bench_$preset.json"
    cat "$out/session_bench_$preset.log"
  done
fi
if has load; then
  "$bundle/bin/efla_server" --preset 340m --load-format dummy --device cuda --listen 127.0.0.1:0 --admin 127.0.0.1:0 \
    --max-running 256 --state-slots 512 --max-batch-tokens 4096 >"$out/load_server.out" 2>"$out/load_server.log" &
  server=$!
  trap 'kill -TERM $server 2>/dev/null' EXIT
  target=""
  for _ in $(seq 600); do
    target=$(sed -n 's/^efla_server ready grpc=\([^ ]*\).*/\1/p' "$out/load_server.out")
    [ -z "$target" ] || break
    sleep 0.1
  done
  row load_256 "$bundle/bin/efla" load --target "$target" --concurrency 256 --requests 1024 --prompt-lengths 64 \
    --max-tokens 256 --json
  row load_1 "$bundle/bin/efla" load --target "$target" --concurrency 1 --requests 8 --prompt-lengths 2048 \
    --max-tokens 256 --json
  kill -TERM $server
  wait $server
  trap - EXIT
  tail -n 40 "$out/load_256.log" "$out/load_1.log"
fi
printf '%s\n' "" "${table[@]}"
exit $status
