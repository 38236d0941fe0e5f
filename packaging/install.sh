#!/bin/sh
# install.sh - install Holdfast from this folder, or remove what was installed.
#
#   ./install.sh [PREFIX]             install below PREFIX (/usr/local)
#   ./install.sh --remove [PREFIX]    remove it again; configurations and repositories stay
#
# DESTDIR is put before PREFIX, for those who make packages.
set -eu
cd "$(dirname "$0")"

remove=
if [ "${1:-}" = --remove ]; then
  remove=yes
  shift
fi
case ${1:-} in
  -*) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2 ;;
esac
prefix=${1:-/usr/local}
root=${DESTDIR:-}$prefix

find bin lib sbin share -type f | sort | while read -r file; do
  if [ -n "$remove" ]; then
    rm -f "$root/$file"
    continue
  fi
  mkdir -p "$root/$(dirname "$file")"
  case $file in
    bin/* | sbin/*) install -m 0755 "$file" "$root/$file" ;;
    *.service)
      sed "s|/usr/bin/holdfast|$prefix/bin/holdfast|" "$file" >"$root/$file"
      chmod 0644 "$root/$file"
      ;;
    *) install -m 0644 "$file" "$root/$file" ;;
  esac
done
if [ -n "$remove" ]; then
  rmdir "$root/share/doc/holdfast/docs/tutorials" "$root/share/doc/holdfast/docs" "$root/share/doc/holdfast/examples" "$root/share/doc/holdfast" 2>/dev/null || true
  echo "removed from $root"
else
  echo "installed below $root"
fi
if [ -z "${DESTDIR:-}" ] && [ -d /run/systemd/system ]; then
  systemctl daemon-reload || true
fi
