#!/usr/bin/env bash
# Prints how many compilers to run at once: one a core, with a gigabyte of free memory each.
set -euo pipefail
cores=$(nproc)
gigabytes=$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)
jobs=$((gigabytes < cores ? gigabytes : cores))
echo $((jobs > 0 ? jobs : 1))
