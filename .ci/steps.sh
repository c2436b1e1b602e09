# Shared by .ci/run and .ci/deep: a fresh copy with README's environment, and test commands with a second look.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
copy=$(mktemp -d)
times=$copy/times.txt
report() {
    code=$?
    cat "$times" 2>/dev/null || true
    grep -hE '^[0-9]+ (passed|failed|skipped|deselected|error).* in [0-9.]+s' "$copy/tests.log" 2>/dev/null || true
    rm -rf "$copy"
    exit "$code"
}
trap report EXIT

# What is tracked, as it is now: no environment, no caches, no past runs.
git -c safe.directory="$root" -C "$root" ls-files -z | tar -C "$root" --null -T - -cf - | tar -C "$copy" -xf -
cd "$copy"
# Real text, where it lies beside the repository.
[ -d "$root/../shared/data" ] && export COLLAPIPE_TEST_DATA="$root/../shared/data"

# The one line that users read is the one that is tested.
command=$(grep -E '^python3 -m venv .* && \.venv/bin/pytest$' README.md)
if [ "$(printf '%s\n' "$command" | wc -l)" -ne 1 ]; then
    echo "README.md: expected one line that makes an environment and ends with .venv/bin/pytest, found:" "$command" >&2
    exit 2
fi
environment=${command% && .venv/bin/pytest}

# step COMMAND...: run it, and note its seconds.
step() {
    local began=$SECONDS code=0
    echo "+ $*"
    "$@" || code=$?
    printf '%5d s  %s\n' $((SECONDS - began)) "$*" >>"$times"
    return "$code"
}

# tests OPTIONS COMMAND...: run a test command; up to ten tests that failed are run once more with pytest's OPTIONS, alone.
# What passes then is printed as unstable. What fails twice, more failures and errors of collection fail.
tests() {
    local options=$1 code=0 failed
    shift
    rm -rf .pytest_cache
    step "$@" 2>&1 | tee -a tests.log || code=$?
    [ "$code" -eq 1 ] || return "$code"
    failed=$(python3 -c 'import json; print(*json.load(open(".pytest_cache/v/cache/lastfailed")), sep="\n")') || return 1
    [ "$(printf '%s\n' "$failed" | wc -l)" -le 10 ] || return 1
    # shellcheck disable=SC2086
    step timeout 900 .venv/bin/pytest -n 0 --last-failed --last-failed-no-failures none $options 2>&1 | tee -a tests.log || return 1
    printf '%s\n' "$failed" | sed 's/^/unstable: /' | tee -a "$times"
}
