#!/usr/bin/env bash
# Install the package and what its tests need. VERSIONS: requirements that come first. PRE: not empty for pre-releases.
# Other libraries that tests compare with are left out: their tests are skipped.
set -euo pipefail
pip=(python -m pip install --quiet)
jax=()
if python -c 'import sys; raise SystemExit(sys.version_info < (3, 11))'; then
  jax=("jax>=0.7" "optax>=0.2.5")
fi
if [ -n "${PRE:-}" ]; then
  "${pip[@]}" --pre torch --index-url https://download.pytorch.org/whl/nightly/cpu
  "${pip[@]}" --pre jax jaxlib --extra-index-url https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/
  "${pip[@]}" --pre numpy optax
elif [ -n "${VERSIONS:-}" ]; then
  read -ra versions <<< "$VERSIONS"
  "${pip[@]}" "${versions[@]}" --extra-index-url https://download.pytorch.org/whl/cpu
fi
# "+": the bash of macOS takes an empty array for a variable that is not set
"${pip[@]}" ".[torch,cli]" ${jax[@]+"${jax[@]}"} ml-dtypes safetensors \
  pytest pytest-xdist hypothesis sybil typing-extensions import-linter \
  --extra-index-url https://download.pytorch.org/whl/cpu
python -m pip list
