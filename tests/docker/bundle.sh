#!/usr/bin/env bash
# Prove the offline bundle: make one for the CPU, install it where no network is, run the demo
# there, and see that a changed part is refused.
#
#   bundle.sh DIR     needs root (for the network namespace), iproute2, a network for the making,
#                     20 GB below DIR, which must be new or empty; DIR/bundle stays
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DIR=$(realpath -m "${1:?usage: bundle.sh DIR}")
BEGIN=$SECONDS

say() { printf '[%4d s] %s\n' $((SECONDS - BEGIN)) "$*" >&2; }
fail() { say "FAILED: $1"; exit 1; }

# alone COMMAND...: in a network namespace with a loopback and no route, with nobody's settings
alone() {
  env -i PATH="$PATH" HOME="$DIR/home" unshare --net bash -c \
    'set -e; ip link set lo up; [[ -z $(ip route) ]]; exec "$@"' bash "$@"
}

[[ $(id -u) == 0 ]] || { say "needs root, for a network namespace"; exit 2; }
[[ -z $(ls -A "$DIR" 2>/dev/null) ]] || { say "$DIR: expected a new or empty folder"; exit 2; }
mkdir -p "$DIR/home"
trap 'rm -rf "$DIR/home" "$DIR/installed" "$DIR/bad"' EXIT

"$ROOT/build.sh" bundle --target cpu --dest "$DIR/bundle" --part-size 500000000 >/dev/null
say "ok: a bundle in parts: $(du -sh "$DIR/bundle" | cut -f1)"

alone python3 -c 'import socket; socket.create_connection(("1.1.1.1", 443), 3)' 2>/dev/null \
  && fail "expected no way out of the namespace"
cp -r "$DIR/bundle" "$DIR/bad"
printf x | dd of="$(ls "$DIR"/bad/*.tar.000)" bs=1 seek=1000000 conv=notrunc status=none
alone "$DIR/bad/install.sh" "$DIR/installed" >/dev/null 2>"$DIR/home/refused" \
  && fail "expected a changed part to be refused"
grep -q 'tar.000: FAILED' "$DIR/home/refused" || fail "expected the part's name in the message"
rm -rf "$DIR/bad"
say "ok: a part with one changed byte is refused by name"

alone "$DIR/bundle/install.sh" "$DIR/installed"
say "ok: installed without a network"
alone "$DIR/installed/bin/vllm-r3" demo
say "ok: the demo without a network"
