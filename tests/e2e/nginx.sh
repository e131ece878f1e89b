#!/usr/bin/env bash
# nginx for the end-to-end tests: on Debian as root it is installed where it is missing. Nothing is started, since each test runs one of its own.
# Exit code 77: nginx cannot be had here, and why.
set -euo pipefail
PATH=$PATH:/usr/sbin
cannot() { echo "no nginx: $1" >&2; exit 77; }
command -v nginx >/dev/null && exit 0
[ "$(id -u)" = 0 ] || cannot "it is not installed, and only root could install it"
command -v apt-get >/dev/null || cannot "it is not installed, and this is no Debian"
log=$(mktemp)
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends nginx-light; } >"$log" 2>&1 \
  || cannot "apt-get cannot install nginx-light: see $log"
rm -f "$log"
