#!/bin/sh
# launch/horovodrun.sh -np 8 -H a:4,b:4 python -m hvdtrain: horovodrun with hvdtrain's settings; see --help.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P) || exit 1
exec "$here/run" python "$here/horovodrun.py" "$@"
