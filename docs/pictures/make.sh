#!/usr/bin/env bash
# Makes report.png: the top of the report of the shipped experiment hsb, in Chromium. Run in a clone with .venv active.
set -euo pipefail
pictures=$(cd "$(dirname "$0")" && pwd)
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
coterie run hsb --transport loopback --quiet --output "$run/hsb" >"$run/said"
coterie report "$run/hsb"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1280,1000 --virtual-time-budget=8000 \
  --screenshot="$pictures/report.png" "file://$run/hsb/report.html"
