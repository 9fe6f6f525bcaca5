# Sourced by the other scripts, from the project's folder. ensure_venv [EXTRA]: ./.venv with this project in it, made
# when it is missing or was made for another folder, brought up to date when pyproject.toml changed, silent otherwise.
# shellcheck shell=bash

find_python() {
  local p
  for p in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$p"
      return
    fi
  done
  echo "error[python-too-old]: Python 3.11 or newer is needed, none is in PATH" >&2
  echo "fix: sudo apt install python3 python3-venv   (or PYTHON=/path/to/python3.11 $0)" >&2
  return 5
}

make_venv() {
  local python
  python=$(find_python) || return
  rm -rf .venv
  "$python" -m venv .venv >/dev/null 2>&1 && return
  rm -rf .venv # Debian without python3-venv leaves half of one
  "$python" -m virtualenv -q .venv 2>/dev/null && return
  uv venv -q --seed --python "$python" .venv 2>/dev/null && return
  echo "error[venv-missing]: $python cannot make a virtual environment" >&2
  echo "fix: sudo apt install python3-venv" >&2
  return 5
}

# A copied or moved folder brings a .venv along whose programs, and this project in it, still are those of the old place.
is_ours() {
  [[ ! -e .venv/.place || $(<.venv/.place) == "$PWD" ]] && .venv/bin/python -c '' 2>/dev/null
}

ensure_venv() {
  local extra=${1:-}
  local stamp=.venv/.installed${extra:+-$extra}
  [[ -n $extra ]] || ! cmp -s pyproject.toml .venv/.installed-dev || stamp=.venv/.installed-dev # holds all that is asked for
  if is_ours && cmp -s pyproject.toml "$stamp"; then
    return
  fi
  is_ours || make_venv || return
  echo "installing this project into .venv" >&2
  .venv/bin/python -m pip install -q --disable-pip-version-check -e ".${extra:+[$extra]}" || return
  cp pyproject.toml "$stamp"
  echo "$PWD" >.venv/.place
}
