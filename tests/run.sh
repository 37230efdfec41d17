#!/usr/bin/env bash
# Sets up what is missing, then runs the tests: bash tests/run.sh [arguments of pytest]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # a test runs several ranks: one thread each is the fastest
exec python -m pytest "$@"
