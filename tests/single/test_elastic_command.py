"""The command line of ``hvdtrain elastic``."""

from pathlib import Path

import pytest

from hvdtrain.commands import elastic
from hvdtrain.errors import UsageError

pytestmark = pytest.mark.usefixtures("as_a_command")


@pytest.mark.parametrize(
    ("arguments", "own", "command"),
    [
        (["2:4", "python", "-m", "x", "--np", "3"], ["2:4"], ["python", "-m", "x", "--np", "3"]),
        (["2:4", "--np", "3", "python"], ["2:4", "--np", "3"], ["python"]),
        (["-H", "a:1", "2:4", "--", "--odd"], ["-H", "a:1", "2:4"], ["--odd"]),
        (["2:4"], ["2:4"], []),
    ],
)
def test_the_command_is_divided_from_the_options(arguments, own, command):
    assert elastic.split_command(arguments) == (own, command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": "4:2"}, "MIN:MAX must be two whole numbers"),
        ({"members": "2"}, "MIN:MAX must be two whole numbers"),
        ({"members": "0:2"}, "MIN:MAX must be two whole numbers"),
        ({"members": "2:4", "np": 5}, "--np must be from 0 to MAX, 4. Received: 5"),
        (
            {"members": "2:4", "np": 3, "hosts": "localhost:2"},
            "--np must be at most the sum of all slots, 2. Received: 3",
        ),
        ({"members": "2:4", "hosts": "a b"}, "hosts must have the form a:4,b:4"),
        ({"members": "2:4", "hosts": "a", "hostfile": Path("x")}, "--hosts excludes --hostfile"),
        ({"members": "2:4", "hostfile": Path("/no/such/file")}, "No such file or directory: '/no/such/file'"),
        ({"members": "2:4", "hosts": "#"}, "there must be at least one host. Received: none in --hosts"),
        ({"members": "2:4", "env": ["NO_SUCH_NAME"]}, "--env must be the name of a variable that is set"),
        ({"members": "2:4", "port": 70000}, "--port must be from 0 to 65535. Received: 70000"),
        ({"members": "2:4", "timeout": -1.0}, "--timeout must be at least 0"),
        ({"members": "2:4", "command": []}, "a command is missing"),
    ],
)
def test_options_are_refused(options, message):
    command = options.pop("command", ["true"])
    with pytest.raises(UsageError, match=message):
        elastic.run(command, **options)
