#!/usr/bin/env bash
# Solves the dependencies of pyproject.toml in a fresh environment and writes requirements.lock and
# requirements-test.lock. requirements-weights.lock is kept by hand.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# The version is named so that a CPU build that lies at hand is taken before a CUDA build of several GB.
pip install --no-compile torch==2.13.0
pip install --no-compile .
pip freeze --exclude torch-jax-pipeline | sed 's/^\(torch==[0-9.]*\).*/\1/' > "$work/runtime"
pip install --no-compile '.[test]'
pip freeze --exclude torch-jax-pipeline | sed 's/^\(torch==[0-9.]*\).*/\1/' > "$work/all"
{ echo '# Exact versions that `make` installs; made by `make lock`. pyproject.toml has the ranges.'; cat "$work/runtime"; } > requirements.lock
{ echo '# What the tests need beside requirements.lock; made by `make lock`.'; grep -vxFf "$work/runtime" "$work/all"; } > requirements-test.lock
