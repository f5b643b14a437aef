#!/usr/bin/env bash
# Installs those Debian packages of deploy/packages.txt that are missing; does nothing, and needs no root, when
# none is. usage: deploy/install_packages.sh GROUP...     (build, test)
set -euo pipefail
list="$(dirname "$(readlink -f "$0")")/packages.txt"
[ $# -gt 0 ] || { echo "usage: $0 GROUP...   (groups: build, test)" >&2; exit 2; }

missing=()
for group in "$@"; do
  mapfile -t packages < <(awk -v group="$group" '$1 == group { print $2 }' "$list")
  [ ${#packages[@]} -gt 0 ] || { echo "$0: no group \"$group\" in $list" >&2; exit 2; }
  for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
  done
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "Installing ${#missing[@]} Debian packages: ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "$0: to install packages, run this as root or install sudo; missing: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
"${apt[@]}" update || echo "$0: apt-get update failed; going on with the package lists there are" >&2
if ! "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; then
  echo "$0: apt-get could not install: ${missing[*]}" >&2
  echo "$0: the packages are those of Debian 12 (bookworm), section main; see apt-get's message above" >&2
  exit 1
fi
