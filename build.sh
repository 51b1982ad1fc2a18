#!/usr/bin/env bash
# Build, run and test vllm-r3. Results go to stdout, progress to stderr.
# Everything that is built lies in .build/; a build that was cut off is finished by the next run.
set -euo pipefail
# Another project's modules have no place in a locked environment; without cached bytecode vLLM starts
# 20 s later, every time.
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
BUILD=$ROOT/.build
VLLM=0.21.0
PIN=$ROOT/patches/v$VLLM
TOOL=$BUILD/tool
TOOL_LOCK=$ROOT/patches/tool.txt
STEP=0
STEPS=0
CHECKING= # set: a failed step is kept in FAILED and the next one runs
FAILED=()
START=$SECONDS

usage() {
  cat <<'END'
usage: ./build.sh COMMAND

  demo  [ARGS]                         build, serve a tiny model, compare its rows with an oracle
  test  [PART ...] [PYTEST ARGS]       everything that runs without a GPU, or parts of it:
                                       unit, upstream, engine, serving
  venv  [DIR] [--target cpu|cuda]      a patched environment (default: .build/venv)
  wheel [--target cpu|cuda] [--dest DIR]  the patched wheel (default: dist), its path printed last
  bundle [--target cpu|cuda] [--dest DIR] [--part-size BYTES]
                                       wheels and an installer for hosts without a network
  image [ARGS]                         an image by docker/Dockerfile; ARGS go to docker build
  lock                                 resolve the dependency locks again, as of the release
  clean                                remove .build and dist

Each takes --vllm VERSION, one that patches/ has a series on (default: 0.21.0); what is built for another
than the default lies in .build/vVERSION. The default target is cuda where an NVIDIA driver is present, else cpu (demo and test: always cpu).
Environment: PYTHON (the interpreter), VLLM_R3_WHEEL (a pinned wheel that you have already),
IMAGE_BUILDER (image: the command to use, by default "docker build").
END
}

say() { printf '%s\n' "$*" >&2; }
die() { say "build.sh: $1"; exit "${2:-1}"; }

# step NAME WHAT COMMAND...: run one step with its output in a log, which is shown if it fails.
step() {
  local name=$1 what=$2 begin=$SECONDS log status
  shift 2
  STEP=$((STEP + 1))
  log=$BUILD/logs/$name.log
  mkdir -p "$BUILD/logs"
  printf '[%d/%d] %s … ' "$STEP" "$STEPS" "$what" >&2
  # not "if (...)": bash ignores set -e in all that a condition runs
  set +e
  (
    set -e
    "$@"
  ) >"$log" 2>&1
  status=$?
  set -e
  if ((status == 0)); then
    say "($((SECONDS - begin)) s)"
  else
    say "failed after $((SECONDS - begin)) s; the end of $log:"
    tail -n 25 "$log" >&2
    [[ $CHECKING ]] || die "step '$what' failed; fix the error above and run the same command again"
    FAILED+=("$what")
  fi
}

# cached STAMP KEY NAME WHAT COMMAND...: a step that runs unless STAMP says that it did with this KEY.
cached() {
  local stamp=$1 key=$2
  shift 2
  if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
    step "$1" "$2" true
  else
    rm -f "$stamp"
    step "$@"
    mkdir -p "$(dirname "$stamp")"
    printf '%s\n' "$key" >"$stamp.tmp" && mv -f "$stamp.tmp" "$stamp"
  fi
}

key() { cat "$@" | sha256sum | cut -c1-64; }
sums() { find "$@" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum; }
own_python() { PYTHONPATH=$ROOT "$TOOL/bin/python" "$@"; }
has_driver() { [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L >/dev/null 2>&1; }

# --- the host ------------------------------------------------------------------------------------

in_range() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if in_range "$name"; then
      PY=$("$name" -c 'import sys; print(sys.executable)')
      return
    fi
  done
  name=${PYTHON:-python3}
  die "expected Python 3.10 to 3.13, found $name: $("$name" -V 2>/dev/null || echo none); \
install one and set PYTHON=/path/to/it"
}

check_host() {
  [[ $(uname -sm) == "Linux x86_64" ]] \
    || die "expected Linux on x86_64, which the pinned wheels are built for, found $(uname -sm)"
  command -v git >/dev/null || die "git was not found; install it (Debian: apt-get install git)"
  find_python
  "$PY" -c 'import ensurepip, venv' 2>/dev/null || die "$PY has no ensurepip, so it cannot make a \
virtual environment; install it (Debian: apt-get install python3-venv)"
  mkdir -p "$BUILD" 2>/dev/null || die "cannot write to $BUILD"
}

# need_space DIR GIB WHAT
need_space() {
  local free
  free=$(($(df -Pk "$1" | awk 'NR == 2 {print $4}') / 1048576))
  ((free >= $2)) || die "$3 needs $2 GiB, $1 has $free GiB free; free some space, or build elsewhere"
}

# One build at a time in a checkout; the lock ends with the process that holds it.
lock_build() {
  exec 9>"$ROOT/.build/lock"
  flock -n 9 && return
  say "another build.sh is at work in $BUILD; waiting for it"
  flock 9
}
unlock_build() { exec 9>&-; }

# --- steps ---------------------------------------------------------------------------------------

make_tool() {
  rm -rf "$TOOL"
  "$PY" -m venv "$TOOL"
  "$TOOL/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
    -r "$TOOL_LOCK"
}

tool_step() {
  cached "$TOOL/.key" "$({ cat "$TOOL_LOCK"; "$PY" -VV; echo "$PY $TOOL"; } | key)" \
    tool "the tools (uv and the patch reader)" make_tool
}

fetch_wheel() { own_python -m vllm_r3 series fetch --vllm "$VLLM" --target "$1"; }
make_wheel() {
  own_python -m vllm_r3 wheel --vllm "$VLLM" --target "$1" --dest "$2" >"$BUILD/wheel-$1.path"
}

wheel_steps() { # TARGET DEST
  local made=$BUILD/wheel-$1
  step "fetch-$1" "the pinned vLLM $VLLM wheel for $1, by its hash" fetch_wheel "$1"
  [[ -f $made.path && -f $(<"$made.path") ]] || rm -f "$made.key"
  cached "$made.key" "$({ echo "$2 ${SOURCE_DATE_EPOCH:-}"
    sums "$PIN/pin.toml" "$PIN/series" "$PIN"/*.patch "$ROOT/vllm_r3/series"; } | key)" \
    "wheel-$1" "the wheel with the series applied" make_wheel "$1" "$2"
  WHEEL=$(<"$made.path")
}

uv() {
  local index
  # an index that pip is set up with serves uv too
  if [[ -z ${UV_INDEX_URL:-}${UV_DEFAULT_INDEX:-} ]] \
    && index=$("$TOOL/bin/python" -m pip config get global.index-url 2>/dev/null); then
    export UV_DEFAULT_INDEX=$index
  fi
  "$TOOL/bin/uv" "$@"
}

# deps_step DIR TARGET: an environment with exactly the locked packages. What an interrupted run left
# is thrown away; a folder that is not ours is refused.
deps_step() {
  if [[ -n $(ls -A "$1" 2>/dev/null) && ! -d $1/.vllm-r3 ]]; then
    die "$1: expected a new folder or an environment of this command, found other files; \
choose another folder"
  fi
  cached "$1/.vllm-r3/deps" "$({ cat "$PIN/locks/$2.txt"; "$PY" -VV; echo "$PY $1 $2"; } | key)" \
    deps "the locked dependencies in $1 (gigabytes, the first time)" make_deps "$1" "$2"
}

make_deps() { # DIR TARGET
  rm -rf "$1"
  mkdir -p "$1/.vllm-r3"
  need_space "$1" "$([[ $2 == cpu ]] && echo 8 || echo 14)" "the environment for $2"
  uv venv --quiet --allow-existing --python "$PY" "$1"
  install_locked "$1" "$2"
}

install_locked() { # DIR LOCK
  uv pip install --quiet --no-deps --require-hashes --python "$1/bin/python" -r "$PIN/locks/$2.txt"
}

install_test_needs() {
  install_locked "$BUILD/venv" test
  # frameworks whose own code reads rows in tests, without what they depend on; no import finds them
  uv pip install --quiet --no-deps --require-hashes --python "$BUILD/venv/bin/python" \
    --python-version 3.12 --target "$BUILD/consumers" -r "$ROOT/patches/consumers.txt" ||
    echo "the frameworks of consumers.txt cannot be had: their tests are skipped"
}

# vllm_step DIR TARGET FORM: the patched wheel and this package, without their dependencies. FORM is
# hatchling's: wheel:editable in this checkout, wheel:standard in a folder of its own.
vllm_step() {
  local sources=()
  [[ $3 == wheel:editable ]] || sources=("$ROOT/vllm_r3" "$ROOT/patches")
  cached "$1/.vllm-r3/vllm" \
    "$({ cat "$BUILD/wheel-$2.key" "$1/.vllm-r3/deps"; sums "$ROOT/pyproject.toml" "${sources[@]}"; } | key)" \
    vllm "the patched vLLM and vllm-r3" install_vllm "$1" "$3"
}

install_vllm() { # DIR FORM
  uv pip install --quiet --no-deps --no-cache --reinstall --python "$1/bin/python" "$WHEEL"
  make_self "$2"
  uv pip install --quiet --no-deps --no-cache --reinstall --python "$1/bin/python" \
    "$BUILD"/self/*.whl
  uv pip check --python "$1/bin/python"
}

make_self() { # FORM
  rm -rf "$BUILD/self"
  (cd "$ROOT" && "$TOOL/bin/python" -m hatchling build -t "$1" -d "$BUILD/self")
}

download_locked() { # LOCK DIR: every wheel of a lock for this interpreter, and nothing else
  "$TOOL/bin/python" -m pip download --disable-pip-version-check --no-deps --require-hashes \
    --only-binary=:all: --dest "$2" -r "$1"
}

# fetch_locked TARGET: the content of a bundle but for the two wheels that are made here
fetch_locked() {
  rm -rf "$BUILD/bundle"
  download_locked "$PIN/locks/$1.txt" "$BUILD/bundle/wheels"
  download_locked "$TOOL_LOCK" "$BUILD/bundle/tool"
  find "$BUILD/bundle/tool" -type f -not -name 'uv-*' -delete
}

# make_bundle TARGET DEST PART_SIZE: from the same wheels the same bytes, with no times, owners or
# modes of the files here; SHA256SUMS is written last, without it a bundle is not whole.
make_bundle() {
  local dir=$BUILD/bundle wheel name version python
  python=$("$PY" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  cp "$ROOT/LICENSE" "$dir"
  cp "$PIN/locks/$1.txt" "$dir/requirements.txt"
  for wheel in "$WHEEL" "$BUILD"/self/*.whl; do
    cp "$wheel" "$dir/wheels"
    IFS=- read -r name version _ <<<"${wheel##*/}"
    echo "${name//_/-}==$version --hash=sha256:$(key "$wheel")" >>"$dir/requirements.txt"
    [[ $name != vllm ]] || NAME=vllm-r3-${version%.cpu}-$1-cp${python/./}.tar
  done
  mkdir -p "$2"
  tar --create --directory "$dir" --sort=name --format=gnu --mtime=@315532800 --owner=0 --group=0 \
    --numeric-owner --mode=a+rX,u+w,go-w LICENSE requirements.txt tool wheels \
    | if (($3)); then split --bytes "$3" --numeric-suffixes --suffix-length=3 - "$2/$NAME."; \
      else cat >"$2/$NAME"; fi
  # what is unpacked, and what it becomes: wheels unpack to about two and a half times
  sed -e "s/@NAME@/$NAME/" -e "s/@PYTHON@/$python/" \
    -e "s/@MIB@/$(($(du -sm "$dir" | cut -f1) * 7 / 2 + 1))/" "$ROOT/docker/install.sh" >"$2/install.sh"
  chmod 755 "$2/install.sh"
  (cd "$2" && sha256sum -- * >.sums && mv .sums SHA256SUMS)
  echo "sha256 of SHA256SUMS, to compare by another way: $(key "$2/SHA256SUMS")"
}

# --- commands ------------------------------------------------------------------------------------

# build_venv DIR TARGET: the five steps that both commands of the README start with.
build_venv() {
  local form=wheel:standard
  [[ $1 == "$BUILD/venv" ]] && form=wheel:editable
  check_host
  lock_build
  tool_step
  wheel_steps "$2" "$BUILD/wheels-patched"
  deps_step "$1" "$2"
  vllm_step "$1" "$2" "$form"
}

cmd_venv() {
  options venv "DIR --target" "$@"
  if [[ $TARGET == cuda ]] && ! has_driver; then
    die "--target cuda needs an NVIDIA driver, found none (no /proc/driver/nvidia, nvidia-smi -L \
fails); install the driver, or use --target cpu" 2
  fi
  STEPS=5
  build_venv "${DIR:-$BUILD/venv}" "$TARGET"
  echo "${DIR:-$BUILD/venv}"
}

cmd_wheel() {
  options wheel "--target --dest" "$@"
  STEPS=3
  check_host
  lock_build
  tool_step
  need_space "$BUILD" 2 "the wheel"
  wheel_steps "$TARGET" "${DEST:-$ROOT/dist}"
  echo "$WHEEL"
}

cmd_bundle() {
  options bundle "--target --dest --part-size" "$@"
  local dest=${DEST:-$ROOT/dist/bundle}
  [[ -z $(ls -A "$dest" 2>/dev/null) ]] || die "$dest: expected a new or empty folder, found \
files; choose another one" 2
  STEPS=6
  check_host
  lock_build
  need_space "$BUILD" "$([[ $TARGET == cpu ]] && echo 9 || echo 14)" "the bundle for $TARGET"
  tool_step
  wheel_steps "$TARGET" "$BUILD/wheels-patched"
  step "deps-$TARGET" "the locked wheels for $TARGET and $("$PY" -V)" fetch_locked "$TARGET"
  step self "vllm-r3 as a wheel" make_self wheel:standard
  step bundle "the bundle in $dest" make_bundle "$TARGET" "$dest" "${PART_SIZE:-0}"
  rm -rf "$BUILD/bundle"
  cat "$BUILD/logs/bundle.log" >&2
  echo "$dest"
}

cmd_image() {
  local labels
  STEPS=1
  check_host
  lock_build
  tool_step
  unlock_build
  labels=$(own_python -c 'import sys
from vllm_r3.series.folder import read_series, series_folder
series = read_series(series_folder(sys.argv[1]))
print("--build-arg=VLLM=" + series.pin.version, f"--build-arg=R3_PIN={series.pin}", f"--build-arg=R3_SERIES={series.hash}")
print("--build-arg=R3_VERSION=" + series.pin.patched_version("cuda"))' "$VLLM")
  # shellcheck disable=SC2086 # words on purpose: "docker build", and the build arguments
  exec ${IMAGE_BUILDER:-docker build} $labels --file "$ROOT/docker/Dockerfile" "$@" "$ROOT"
}

cmd_demo() {
  STEPS=5
  build_venv "$BUILD/venv" cpu
  unlock_build
  say "environment ready after $((SECONDS - START)) s; the demo:"
  exec "$BUILD/venv/bin/vllm-r3" demo "$@"
}

cmd_test() {
  local bin=$BUILD/venv/bin parts=()
  while [[ ${1:-} =~ ^(unit|upstream|engine|serving)$ ]]; do
    parts+=("tests/$1")
    shift
  done
  (($# + ${#parts[@]})) || parts=(tests/unit tests/upstream tests/engine tests/serving)
  STEPS=9
  ((${#parts[@]} < 4)) || STEPS=10
  build_venv "$BUILD/venv" cpu
  ((STEPS == 9)) || step fetch-cuda "the pinned wheel for cuda, which the series must fit too" \
    fetch_wheel cuda
  cached "$BUILD/venv/.vllm-r3/test" "$(key "$PIN/locks/test.txt" "$ROOT/patches/consumers.txt" "$BUILD/venv/.vllm-r3/deps")" \
    test-needs "what the tests need" install_test_needs
  cd "$ROOT"
  CHECKING=1
  step lint "ruff check" "$bin/ruff" check vllm_r3 tests
  step format "ruff format --check" "$bin/ruff" format --check vllm_r3 tests
  step verify "vllm-r3 series verify" "$bin/vllm-r3" series verify --vllm "$VLLM"
  cat "$BUILD/logs/verify.log" >&2
  unlock_build
  say "environment ready after $((SECONDS - START)) s; the tests:"
  "$bin/python" -m pytest "${parts[@]}" "$@" || FAILED+=("pytest")
  ((${#FAILED[@]} == 0)) || die "failed: $(IFS=,; echo "${FAILED[*]}")"
}

cmd_lock() {
  local target
  STEPS=5
  check_host
  lock_build
  tool_step
  for target in cpu cuda; do
    step "lock-$target" "the lock for $target, as of the release" lock_target "$target"
  done
  step lock-test "the lock of what the tests need" lock_test
  step lock-tool "the lock of the tools" lock_tool
}

resolve() { # LOCK ARGS: one lock for Python 3.10 to 3.13, with hashes and without an index's name
  local lock=$1
  shift
  uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --upgrade \
    --no-emit-index-url --no-header --no-annotate --output-file "$lock.tmp" "$@"
  mv "$lock.tmp" "$lock"
}

lock_target() {
  local needs=$BUILD/needs-$1.in
  own_python -c 'import sys
from vllm_r3.series.folder import read_pin, series_folder
from vllm_r3.series.pinned_wheel import pinned_wheel
from vllm_r3.series.wheel import requirements
vllm, target = sys.argv[1:]
pin = read_pin(series_folder(vllm))
print(*requirements(pinned_wheel(pin, target), target), sep="\n")' "$VLLM" "$1" >"$needs"
  # with vllm-r3's own needs, of which unidiff's pin is younger than the release
  resolve "$PIN/locks/$1.txt" --exclude-newer "$(sed -n "s/^as_of = //p" "$PIN/pin.toml")" --exclude-newer-package unidiff=2026-11-01 \
    --extra series "$needs" "$ROOT/pyproject.toml"
}

lock_test() {
  resolve "$PIN/locks/test.txt" --constraint "$PIN/locks/cpu.txt" --extra test "$ROOT/pyproject.toml"
}

lock_tool() { (cd "$ROOT" && resolve "$TOOL_LOCK" --group tool); }

# options COMMAND TAKES ARGS...: set TARGET, DEST, PART_SIZE and DIR from a command line.
options() {
  local command=$1 takes=" $2 "
  TARGET='' DEST='' PART_SIZE='' DIR=''
  shift 2
  while (($#)); do
    if [[ $1 == -* || $takes != *" DIR "* || $DIR ]]; then
      [[ $takes == *" $1 "* ]] || bad_usage "$command does not take $1"
      (($# >= 2)) || bad_usage "$1 needs a value"
      case $1 in
        --target) TARGET=$2 ;;
        --dest) DEST=$(realpath -m "$2") ;;
        --part-size) PART_SIZE=$2 ;;
      esac
      shift 2
    else
      DIR=$(realpath -m "$1")
      shift
    fi
  done
  [[ $TARGET ]] || TARGET=$(has_driver && echo cuda || echo cpu)
  [[ $TARGET == cpu || $TARGET == cuda ]] || bad_usage "--target takes cpu or cuda, got '$TARGET'"
  [[ $PART_SIZE =~ ^[0-9]*$ ]] || bad_usage "--part-size takes a number of bytes, got '$PART_SIZE'"
}

bad_usage() {
  say "build.sh: $1"
  usage >&2
  exit 2
}

# pick_vllm ARGS...: set VLLM and where its files are, and ARGS to the other arguments.
pick_vllm() {
  ARGS=()
  while (($#)); do
    if [[ $1 == --vllm ]]; then
      (($# >= 2)) || bad_usage "--vllm needs a value"
      VLLM=$2
      shift
    else
      ARGS+=("$1")
    fi
    shift
  done
  PIN=$ROOT/patches/v$VLLM
  [[ -f $PIN/pin.toml ]] || bad_usage "--vllm takes a version with a folder in patches, got '$VLLM'"
  [[ $VLLM == 0.21.0 ]] || BUILD=$BUILD/v$VLLM
}

main() {
  local command=${1:-}
  (($# == 0)) || shift
  pick_vllm "$@"
  set -- "${ARGS[@]}"
  case $command in
    demo | test | venv | wheel | bundle | image) "cmd_$command" "$@" ;;
    lock | clean)
      (($# == 0)) || bad_usage "$command takes no argument, got $1"
      "cmd_$command"
      ;;
    -h | --help | help) usage ;;
    *) bad_usage "expected a command, got '${command}'" ;;
  esac
}

cmd_clean() { rm -rf "$ROOT/.build" "$ROOT/dist"; }

main "$@"
