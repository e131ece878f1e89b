#!/usr/bin/env bash
# Chromium and its driver for the browser tests, where they are missing: on Debian as root, from its packages. Exit code 77: they cannot be
# had here, and why.
set -euo pipefail
cannot() { echo "no Chromium: $1" >&2; exit 77; }

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
[ "$(id -u)" = 0 ] || cannot "chromium or chromedriver is not installed, and only root could install them"
command -v apt-get >/dev/null || cannot "chromium or chromedriver is not installed, and this is no Debian"
log=${TMPDIR:-/tmp}/coterie-chromium-apt.log
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium chromium-driver; } >"$log" 2>&1 \
  || cannot "apt-get cannot install chromium and chromium-driver: see $log"
