#!/bin/sh
# launch/mpirun.sh -np 8 -H a:4,b:4 python -m hvdtrain: mpirun with hvdtrain's settings; see --help.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P) || exit 1
exec "$here/run" python "$here/mpirun.py" "$@"
