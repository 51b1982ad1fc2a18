#!/usr/bin/env bash
# Prove docker/Dockerfile without a Docker daemon: build its targets for real with buildah on a base
# made here, look into the images, run the demo and the health check inside, and see that a base
# that is not the pinned vLLM fails the build.
#
#   image.sh [--wheel]    needs root, buildah, debootstrap, a network, 20 GB (--wheel: 40 GB) below
#                         /var/lib/containers, and a checkout that nobody edits meanwhile
#
# --wheel builds the `wheel` target too, which downloads its dependencies again. R3_KEEP=1 leaves
# the images behind; without it only what was there before is left.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
HERE=$ROOT/tests/docker
BASE=localhost/vllm-r3-test/base
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
SITE=usr/local/lib/python3.11/dist-packages
LOG=$(mktemp)
MADE=()
CONTAINERS=()
BEGIN=$SECONDS

say() { printf '[%4d s] %s\n' $((SECONDS - BEGIN)) "$*" >&2; }
fail() {
  say "FAILED: $1"
  tail -n 20 "$LOG" >&2
  exit 1
}
passed() { say "ok: $1"; }

clean() {
  local container
  buildah unmount --all >/dev/null 2>&1 || true
  for container in "${CONTAINERS[@]}"; do
    buildah rm "$container" >/dev/null 2>&1 || true
  done
  [[ ${R3_KEEP:-} ]] || buildah rmi --force "${MADE[@]}" >/dev/null 2>&1 || true
  rm -f "$LOG"
}
trap clean EXIT

needs() {
  [[ $(id -u) == 0 ]] || { say "needs root, for buildah's chroot isolation"; exit 2; }
  local tool
  for tool in buildah debootstrap; do
    command -v "$tool" >/dev/null || { say "needs $tool (Debian: apt-get install $tool)"; exit 2; }
  done
}

# build NAME ARGS...: as a user would, with another builder
build() {
  local name=$1
  shift
  MADE=("localhost/vllm-r3-test/$name" "${MADE[@]}")
  IMAGE_BUILDER="buildah build --isolation chroot --format docker --network host \
--volume $CERTIFICATES:$CERTIFICATES:ro" \
    "$ROOT/build.sh" image --build-arg BASE_IMAGE="$BASE" "$@" \
    --tag "localhost/vllm-r3-test/$name" >"$LOG" 2>&1
}

# refuses WORDS NAME ARGS...: the build fails, and its output has the words
refuses() {
  local words=$1
  shift
  if build "$@"; then
    fail "expected a failed build with '$words', it passed"
  fi
  grep -qF -- "$words" "$LOG" || fail "expected '$words' in the output"
}

setting() { buildah inspect --type image --format "{{.Docker.Config.$2}}" "$1"; }
label() { buildah inspect --type image --format "{{index .Docker.Config.Labels \"$2\"}}" "$1"; }
same() { [[ $2 == "$3" ]] || fail "$1: expected '$2', found '$3'"; }

# start IMAGE: a container of it, in CONTAINER
start() {
  CONTAINER=$(buildah from "$1")
  CONTAINERS+=("$CONTAINER")
}

# derive NAME COMMAND...: an image from the base in which a command has run
derive() {
  local name=$1
  shift
  start "$BASE"
  buildah run --isolation chroot "$CONTAINER" -- "$@" >"$LOG" 2>&1 || fail "derive $name"
  [[ $name != user ]] || buildah config --user worker "$CONTAINER"
  buildah commit --quiet "$CONTAINER" "localhost/vllm-r3-test/$name" >/dev/null
  MADE=("localhost/vllm-r3-test/$name" "${MADE[@]}")
}

check_overlay() {
  local image=localhost/vllm-r3-test/overlay name value
  same "entry point" "$(setting "$BASE" Entrypoint)" "$(setting $image Entrypoint)"
  same "working folder" "$(setting "$BASE" WorkingDir)" "$(setting $image WorkingDir)"
  same "user" 0 "$(setting $image User)"
  [[ $(setting $image Healthcheck.Test) == *healthcheck.py* ]] || fail "no HEALTHCHECK"
  while IFS="=" read -r name value; do
    same "label $name" "$value" "$(label $image "$name")"
  done < <(IMAGE_BUILDER="printf %s\\n" "$ROOT/build.sh" image \
    | sed -n -e 's/^--build-arg=R3_PIN/vllm-r3.pin/p' -e 's/^--build-arg=R3_SERIES/vllm-r3.series/p' \
      -e 's/^--build-arg=R3_VERSION/org.opencontainers.image.version/p')
}

# changed: the files of vLLM that are not the base's, sorted; those of the series and its version
check_changes() {
  local base image
  start "$BASE"
  base=$(buildah mount "$CONTAINER")
  start localhost/vllm-r3-test/overlay
  image=$(buildah mount "$CONTAINER")
  diff --recursive --brief --no-dereference "$base/$SITE" "$image/$SITE" \
    | sed -n -e "s#^Only in .*/$SITE/\(vllm.*\): #\1/#p" -e "s#^Only in .*/$SITE: #/#p" \
      -e "s#^Files .*/$SITE/\(.*\) and .*#\1#p" | grep -v dist-info | sort >"$LOG.changed" || true
  "$ROOT/.build/tool/bin/python" - "$ROOT" "$LOG.changed" <<'PY' >"$LOG" 2>&1 || fail "changes"
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from vllm_r3.series.folder import read_series
from vllm_r3.series.patch import blobs
want = {*blobs(read_series().patches()), "vllm/_version.py"}
found = set(Path(sys.argv[2]).read_text().split())
# diff names a new folder alone
new = {path for path in want for place in found if path.startswith(f"{place}/")}
left = {place for place in found - want if not any(path.startswith(f"{place}/") for path in want)}
assert found - left | new >= want - {p for p in want if p.endswith(".pyc")}, want - found - new
assert not left, left
PY
  rm -f "$LOG.changed"
}

# serve IMAGE: its entry point on a tiny model; the health check and `verify server` beside it
serve() {
  local port=18123 url=http://127.0.0.1:18123 server tries=150
  start "$1"
  in_net() { buildah run --isolation chroot --network host "$@"; }
  in_net "$CONTAINER" -- python3 -c "from pathlib import Path; from vllm_r3.demo.tiny_models import write_model
write_model('moe', Path('/tmp/model'))" >"$LOG" 2>&1 || fail "the tiny model in $1"
  # ends by a file, for a signal to buildah does not reach what runs inside
  in_net --env TORCHDYNAMO_DISABLE=1 --env VLLM_CPU_KVCACHE_SPACE=1 --env HF_HUB_OFFLINE=1 \
    "$CONTAINER" -- sh -c "vllm serve /tmp/model --enable-return-routed-experts --enforce-eager \
--dtype float32 --block-size 32 --max-model-len 512 --port $port & server=\$!
      while [ ! -e /tmp/stop ] && kill -0 \$server; do sleep 1; done; kill \$server; wait" \
    >"$LOG" 2>&1 &
  server=$!
  until in_net --env VLLM_R3_HEALTH_URL=$url/health "$CONTAINER" -- \
    python3 /usr/local/lib/vllm-r3/healthcheck.py 2>/dev/null; do
    ((tries--)) && kill -0 "$server" 2>/dev/null || fail "no healthy server in $1"
    sleep 2
  done
  passed "$1 serves by its entry point, its health check passes"
  in_net "$CONTAINER" -- vllm-r3 verify server $url >&2 || fail "verify server in $1"
  in_net "$CONTAINER" -- touch /tmp/stop
  wait "$server" || true
  passed "vllm-r3 verify server in $1"
}

run_demo() {
  start "$1"
  buildah run --isolation chroot --network host "$CONTAINER" -- vllm-r3 demo >"$LOG" 2>&1 \
    || fail "the demo in $1"
  grep 'agree with the oracle' "$LOG" >&2
}

check_rl_ci() {
  start localhost/vllm-r3-test/rl-ci
  inside() { buildah run --isolation chroot "$CONTAINER" -- "$@" >"$LOG" 2>&1 || fail "$*"; }
  inside vllm-r3 series status --site-packages "/$SITE"
  grep -q '^patched with series .*vLLM 0.21.0+r3' "$LOG" || fail "status of a patched container"
  inside vllm-r3 series revert --site-packages "/$SITE"
  inside vllm-r3 series status --site-packages "/$SITE"
  grep -q '^stock, vLLM 0.21.0+cpu$' "$LOG" || fail "status after a roll back"
  inside vllm-r3 series apply --site-packages "/$SITE"
  grep -q '^vLLM 0.21.0+r3.*files changed$' "$LOG" || fail "patching a container that runs"
}

main() {
  local target=patched wheel=
  [[ ${1:-} != --wheel ]] || wheel=1
  needs
  "$ROOT/build.sh" wheel --target cpu --dest "$ROOT/.build/wheels-patched" >"$LOG" 2>&1 \
    || fail "build.sh"
  if ! buildah inspect --type image "$BASE" >/dev/null 2>&1 \
    || ! buildah inspect --type image "$BASE-python" >/dev/null 2>&1; then
    say "a base with the pinned CPU wheel"
    "$HERE/base.sh" "$BASE" >"$LOG" 2>&1 || fail "base"
    MADE+=("$BASE" "$BASE-python")
  fi

  build overlay || fail "build of the default target"
  check_overlay
  passed "overlay builds; entry point, folder and user are the base's; labels and health check"
  check_changes
  passed "the image differs from its base in the files of the series and in nothing else of vLLM"

  derive modified sh -c "echo >>/$SITE/vllm/outputs.py; echo >>/$SITE/vllm/v1/outputs.py"
  refuses "vllm/outputs.py" no --target $target --build-arg BASE_IMAGE=localhost/vllm-r3-test/modified
  grep -q '^  vllm/v1/outputs.py$' "$LOG" || fail "expected both files in the list"
  passed "a base with two modified files is refused with both names"
  derive older sed -i 's/^Version: .*/Version: 0.20.2/' "/$SITE/vllm-0.21.0+cpu.dist-info/METADATA"
  refuses "expected vLLM 0.21.0, found 0.20.2" no --target $target \
    --build-arg BASE_IMAGE=localhost/vllm-r3-test/older
  passed "a base with another vLLM is refused with both versions"
  refuses "expected series 0123, found" no --target $target --build-arg R3_SERIES=0123
  passed "a label that does not say what was applied is refused"
  derive user useradd --uid 1234 --create-home worker
  refuses "the base runs as user 1234, BASE_USER is 0; pass --build-arg BASE_USER=1234" no \
    --target $target --build-arg BASE_IMAGE=localhost/vllm-r3-test/user
  build user-overlay --target $target --build-arg BASE_IMAGE=localhost/vllm-r3-test/user \
    --build-arg BASE_USER=worker || fail "build on a base with a user"
  same "user" worker "$(setting localhost/vllm-r3-test/user-overlay User)"
  passed "a base that runs as another user keeps it, and is refused without saying so"

  build rl-ci --target rl-ci || fail "build of rl-ci"
  check_rl_ci
  passed "rl-ci builds; a container is rolled back and patched again"
  serve localhost/vllm-r3-test/rl-ci
  run_demo localhost/vllm-r3-test/rl-ci
  passed "the demo inside of rl-ci"

  if [[ $wheel ]]; then
    build wheel --target wheel --build-arg TARGET=cpu --build-arg PYTHON_IMAGE="$BASE-python" \
      || fail "build of wheel"
    build wheel-rl-ci --target rl-ci --build-arg BASE_IMAGE=localhost/vllm-r3-test/wheel \
      || fail "build of rl-ci on wheel"
    run_demo localhost/vllm-r3-test/wheel-rl-ci
    passed "wheel builds, and rl-ci on it runs the demo"
  fi
  say "all passed"
}

main "$@"
