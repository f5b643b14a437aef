#!/usr/bin/env bash
# Installs what is missing, builds and tests. For Debian 12, as root or with sudo. The last line is the sum of all
# stages, "N passed, N failed"; the exit status is 0 only when nothing failed.
#
#   tests/run.sh           the release build with every test: what CI runs
#   tests/run.sh --all     that, then both sanitizer builds
#   tests/run.sh --asan    address and undefined-behaviour sanitizers, server included
#   tests/run.sh --tsan    thread sanitizer, the engine without gRPC
#   tests/run.sh --tidy    clang-tidy over the sources
#
# Options add up: --asan --tsan runs these two. Builds lie in build/test, build/asan and build/tsan.
set -uo pipefail

cd "$(dirname "$(dirname "$(readlink -f "$0")")")" || exit 1
stages=()
for argument in "$@"; do
  case "$argument" in
    --all) stages+=(release asan tsan) ;;
    --asan) stages+=(asan) ;;
    --tsan) stages+=(tsan) ;;
    --tidy) stages+=(tidy) ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown option $argument; see $0 --help" >&2; exit 2 ;;
  esac
done
[ ${#stages[@]} -gt 0 ] || stages=(release)

passed=0
failed=0
times=()
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# took START NAME: notes and says how long a part has taken.
took() {
  times+=("$(printf '%5d s  %s' $((SECONDS - $1)) "$2")")
  echo "--- $2: $((SECONDS - $1)) s, $SECONDS s in all"
}

# step NAME COMMAND...: runs it and notes its time; a failure counts as one.
step() {
  local name=$1 start=$SECONDS status=0
  shift
  echo "--- $name"
  "$@" || status=$?
  took "$start" "$name"
  [ $status -eq 0 ] || { echo "--- $name FAILED (status $status)"; failed=$((failed + 1)); }
  return $status
}

# run_tests NAME BUILD-FOLDER CTEST-ARGUMENTS...: adds ctest's counts to the sums.
run_tests() {
  local name=$1 folder=$2 start=$SECONDS status total bad skipped
  shift 2
  echo "--- $name: ctest $*"
  # Line by line, so that whoever watches sees what runs; rows of dots and skipped tests are left out.
  timeout --foreground --kill-after=60 "$longest_s" "${runner[@]}" ctest --test-dir "$folder" --parallel "$(nproc)" --output-on-failure \
    --no-tests=error --timeout 300 "$@" 2>&1 </dev/null | tee "$log" | sed --unbuffered --regexp-extended '/ \(Skipped\)$/d; s/\.{4,}/.../'
  status=${PIPESTATUS[0]}
  [ "$status" -ne 124 ] || echo "--- $name: ctest did not end within $longest_s s"
  took "$start" "$name: ctest"
  total=$(sed -n 's/^[0-9]*% tests passed, [0-9]* tests failed out of \([0-9]*\)$/\1/p' "$log" | tail -n 1)
  bad=$(sed -n 's/^[0-9]*% tests passed, \([0-9]*\) tests failed out of [0-9]*$/\1/p' "$log" | tail -n 1)
  skipped=$(grep -c '\*\*\*Skipped' "$log")
  total=${total:-0}
  bad=${bad:-1}
  [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || bad=1  # ctest failed for a reason that is not a test's
  passed=$((passed + (total > bad ? total - bad - skipped : 0)))
  failed=$((failed + bad))
  if [ "$skipped" -gt 0 ]; then
    echo "--- $name: $skipped skipped, their reasons (with how often each was given):"
    awk '/: Skipped$/ { getline; print }' "$folder/Testing/Temporary/LastTest.log" | sort | uniq -c
  fi
}

# Quiet while it works.
configure() {
  cmake "$@" >"$log" 2>&1 || { cat "$log"; return 1; }
}

# build NAME PRESET FOLDER TARGETS... -- CMAKE-ARGUMENTS...
build() {
  local name=$1 preset=$2 folder=$3 targets=()
  shift 3
  while [ $# -gt 0 ] && [ "$1" != -- ]; do targets+=("$1"); shift; done
  [ $# -eq 0 ] || shift
  step "$name: configure" configure --preset "$preset" -B "$folder" "$@" || return 1
  step "$name: build" "${runner[@]}" cmake --build "$folder" --parallel "$(deploy/build_jobs.sh)" \
    --target "${targets[@]}"
}

# ctest is ended after so many seconds. Single tests have limits of their own; this is for what these do not see.
longest_s=2400

runner=()
step packages deploy/install_packages.sh build test || stages=()

for stage in "${stages[@]}"; do
  runner=()
  case "$stage" in
    release)
      build release release build/test all all_verify_interface_header_sets -- -DEFLA_WERROR=ON &&
        run_tests release build/test
      ;;
    asan)
      export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
      export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
      longest_s=7200
      build asan asan build/asan all && run_tests asan build/asan --label-exclude style
      ;;
    tsan)
      # g++ 12's run time needs fewer random address bits than newer kernels use.
      if setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
        runner=(setarch "$(uname -m)" --addr-no-randomize)
      fi
      longest_s=7200
      export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/tests/tsan.supp"
      build tsan tsan build/tsan tests/server/all && run_tests tsan build/tsan/tests/server
      ;;
    tidy)
      step "tidy: packages" deploy/install_packages.sh tidy &&
        build tidy dev build/dev tidy
      ;;
  esac
done

echo
printf '%s\n' "${times[@]}"
echo
echo "$((passed + failed > 0 ? 100 * passed / (passed + failed) : 0))% tests passed, $failed tests failed out of $((passed + failed))"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
