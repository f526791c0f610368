#!/usr/bin/env bash
# Runs a study of the published claims: bash examples/claims/run.sh study=claims [action=list|report] [arms= fleets= seeds=]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
