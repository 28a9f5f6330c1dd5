#!/bin/sh
# launch/horovodrun.sh -np 8 -H a:4,b:4 python -m hvdtrain: horovodrun with what hvdtrain needs; --help lists the options.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P) || exit 1
exec "$here/run" python "$here/horovodrun.py" "$@"
