# Sourced by the scripts beside it: go to the checkout's root and, where no virtual environment is active, use .venv.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PATH="$PWD/.venv/bin:$PATH"
fi
