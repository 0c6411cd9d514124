#!/usr/bin/env bash
# Write the lock files of requirements/ again, from the public package index alone.
set -euo pipefail
cd "$(dirname "$0")/.."

lock() {  # NAME SOURCES AND EXTRAS...
  local name=$1
  shift
  uv pip compile --quiet --no-config --default-index https://pypi.org/simple --upgrade --universal --python-version 3.11 \
    --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make locks" \
    --output-file "requirements/$name.txt" "$@"
}

lock api pyproject.toml --extra postgresql --extra mcp
lock worker pyproject.toml --extra postgresql --extra profiler --extra search
lock ci pyproject.toml --extra profiler --extra dev
lock build requirements/build.in
lock site pyproject.toml --extra docs --extra mcp requirements/site.in
lock publish requirements/publish.in
