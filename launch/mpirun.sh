#!/bin/sh
# launch/mpirun.sh -np 8 -H a:4,b:4 python -m hvdtrain: mpirun with what hvdtrain needs; --help lists the options.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P) || exit 1
exec "$here/run" python "$here/mpirun.py" "$@"
