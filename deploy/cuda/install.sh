#!/usr/bin/env bash
# Installs NVIDIA's CUDA packages for Debian 12 in an image; does nothing when VERSION is empty. Needs NVIDIA's
# cuda-keyring_*_all.deb in this folder, which names and signs their package source.
#
# usage: install.sh build|serve VERSION      VERSION: as in their packages' names, 13-0
set -euo pipefail
purpose=${1:?usage: install.sh build|serve VERSION}
version=${2:-}
[ -n "$version" ] || exit 0
shopt -s nullglob
keyrings=("$(dirname "$(readlink -f "$0")")"/cuda-keyring_*_all.deb)
if [ ${#keyrings[@]} -ne 1 ]; then
  echo "install.sh: CUDA=$version needs NVIDIA's cuda-keyring_*_all.deb for Debian 12 in deploy/cuda/; there are ${#keyrings[@]}" >&2
  exit 1
fi
# The config package is what makes the link /usr/local/cuda; the driver's libraries come from the machine.
config="cuda-toolkit-$version-config-common"
case "$purpose" in
  build) packages=("$config" "cuda-nvcc-$version" "cuda-cudart-dev-$version" "libcublas-dev-$version") ;;
  serve) packages=("$config" "libcublas-$version") ;;
  *) echo "install.sh: the purpose is $purpose; it must be build or serve" >&2; exit 2 ;;
esac
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install -y --no-install-recommends ca-certificates
dpkg --install "${keyrings[0]}"
apt-get -q update
apt-get -q install -y --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/*
