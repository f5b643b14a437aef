#!/usr/bin/env bash
# The operations tests by hand; ctest runs the same but for what --long adds.
#
#   tests/ops/run.sh [--long]
#
# --long adds an hour of mixed load, minutes of pings and of scrapes, and decodes deploy/envoy.yaml with Envoy's own protos (from
# an npm package). The programs are those of EFLA_TEST_BIN_DIR, or build/release/bin.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
long=()
case "${1:-}" in
  --long) long=(--long) ;;
  "") ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
status=0
echo "--- deployment_test.py"
/usr/bin/python3 deployment_test.py || status=1
for test in monitoring_test.py balancers_test.py faults_test.py scrapes_test.py soak_test.py; do
  echo "--- $test"
  /usr/bin/python3 "$test" "${long[@]}" || status=1
done
if [ ${#long[@]} -gt 0 ]; then
  echo "--- decode_envoy.sh"
  ./decode_envoy.sh || status=1
fi
exit $status
