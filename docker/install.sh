#!/usr/bin/env bash
# Install @NAME@ from this folder into a new virtual environment. Needs no network.
#
#   ./install.sh DIR     needs bash, tar, sha256sum and CPython @PYTHON@ (PYTHON names another
#                        interpreter); DIR must be new or empty
set -euo pipefail
unset PYTHONPATH PYTHONHOME

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=@NAME@
NEED_MIB=@MIB@

say() { printf '%s\n' "$*" >&2; }
die() { say "install.sh: $1"; exit "${2:-1}"; }

(($# == 1)) && [[ $1 != -* ]] || die "expected one argument, the folder of the environment" 2
TARGET=$(realpath -m "$1")
[[ -z $(ls -A "$TARGET" 2>/dev/null) ]] \
  || die "$TARGET: expected a new or empty folder, found files; choose another one"

PY=${PYTHON:-python@PYTHON@}
FOUND=$("$PY" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none)
[[ $FOUND == @PYTHON@ ]] \
  || die "expected CPython @PYTHON@, found $FOUND ($PY); install it, or set PYTHON=/path/to/it"
PY=$("$PY" -c 'import sys; print(sys.executable)')

mkdir -p "$TARGET"
FREE=$(($(df -Pk "$TARGET" | awk 'NR == 2 {print $4}') / 1024))
((FREE >= NEED_MIB)) || die "$TARGET: needs $NEED_MIB MiB, found $FREE MiB free; make room"

say "[1/4] checksums"
cd "$HERE"
[[ -f SHA256SUMS ]] || die "$HERE: expected SHA256SUMS, found none; copy the whole bundle again"
sha256sum --check --quiet --strict SHA256SUMS >&2 \
  || die "$HERE: a file is not what was bundled (above); copy it again"

WORK=$TARGET.unpacked
trap 'rm -rf "$WORK"' EXIT
trap 'rm -rf "$WORK" "$TARGET"; exit 130' INT TERM HUP
rm -rf "$WORK"
mkdir "$WORK"
say "[2/4] unpack"
cat "$NAME"* | tar --extract --file - --directory "$WORK" --no-same-owner
"$PY" -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' \
  "$WORK"/tool/uv-*.whl "$WORK/tool"
UV=$(echo "$WORK"/tool/uv-*.data/scripts/uv)
chmod +x "$UV"

uv() {
  "$UV" --offline --no-config --cache-dir "$WORK/cache" "$@" \
    || { rm -rf "$TARGET"; die "uv $1 $2 failed, above; $TARGET was removed"; }
}

say "[3/4] install"
uv venv --quiet --allow-existing --python "$PY" "$TARGET"
uv pip install --quiet --no-index --find-links "$WORK/wheels" --no-deps --require-hashes \
  --python "$TARGET/bin/python" --requirement "$WORK/requirements.txt"
say "[4/4] check"
uv pip check --python "$TARGET/bin/python" >&2
say "ready; try: $TARGET/bin/vllm-r3 demo"
echo "$TARGET/bin/vllm"
