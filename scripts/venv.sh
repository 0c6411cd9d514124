#!/bin/sh
# Run a program of the active virtual environment, else of .venv, else of .venv-light.
name=$1
shift
for environment in "${VIRTUAL_ENV:-}" .venv .venv-light; do
  if [ -x "$environment/bin/$name" ]; then
    exec "$environment/bin/$name" "$@"
  fi
done
echo "$name is not installed: run 'make setup' or 'make setup-light'" >&2
exit 1
