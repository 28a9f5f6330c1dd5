"""Per-rank state in one file, which is written and read in pieces.

The format is that of safetensors (https://github.com/huggingface/safetensors): the length of the header, the header in
JSON, and the bytes of all tensors. Rank R's tensors are named ``rankR/…`` and stored contiguously.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint.transfer import PIECE_BYTES, Spec, dtype_of, num_bytes
from hvdtrain.system.bounded_files import MAX_BYTES

_LENGTH_BYTES = 8
_CODES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64"},
}
_NAMES = {code: name for name, code in _CODES.items()}


class RankFileWriter:
    """Writes a file, each rank's bytes in order.

    Args:
        specs: the specs of each rank's arrays.
    """

    def __init__(self, path: Path, specs: Sequence[Sequence[Spec]]):
        entries: dict[str, object] = {}
        end = 0
        self._begins, self._digests = [], [hashlib.sha256() for _ in specs]
        for rank, own in enumerate(specs):
            self._begins.append(end)
            for spec in own:
                name, shape, dtype = spec
                begin, end = end, end + num_bytes(spec)
                entries[f"rank{rank}/{name}"] = {
                    "dtype": _CODES[dtype],
                    "shape": list(shape),
                    "data_offsets": [begin, end],
                }
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)  # Readers may map the file: tensors are aligned.
        first = _LENGTH_BYTES + len(header)
        self._positions = [first + begin for begin in self._begins]
        self._file = path.open("xb", buffering=0)
        with self._closed_on_failure():
            self._file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            self._file.truncate(first + end)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """The error refers to this object and may be kept: an open file would take up space though it is deleted."""
        try:
            yield
        except BaseException:
            self._file.close()
            raise

    def write(self, rank: int, piece: np.ndarray) -> None:
        """Writes a rank's next bytes."""
        self._digests[rank].update(piece.data)
        rest = piece.data
        with self._closed_on_failure():
            while rest:
                written = os.pwrite(self._file.fileno(), rest, self._positions[rank])
                self._positions[rank] += written
                rest = rest[written:]

    def close(self) -> list[str]:
        """Closes the file; returns the digest of each rank's bytes."""
        self._file.close()
        return [digest.hexdigest() for digest in self._digests]


class RankFileReader:
    """Reads a file.

    Raises:
        OSError, ValueError, LookupError, TypeError, AttributeError: it is not such a file.
    """

    def __init__(self, path: Path, ranks: int):
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            # A sparse file can be longer than memory.
            if length > min(MAX_BYTES, os.fstat(file.fileno()).st_size):
                raise ValueError(f"the header is longer than the file, or than {MAX_BYTES >> 20} MiB")
            entries = json.loads(file.read(length))
        self.specs: list[list[Spec]] = [[] for _ in range(ranks)]
        """The specs of each rank's arrays."""
        self._positions: dict[str, int] = {}
        first, end = _LENGTH_BYTES + length, 0
        for path_in_file, entry in entries.items():
            rank, _, name = path_in_file.partition("/")
            spec: Spec = (name, [int(each) for each in entry["shape"]], _NAMES[entry["dtype"]])
            begin, end = end, end + num_bytes(spec)
            if entry["data_offsets"] != [begin, end]:
                raise ValueError(f"{path_in_file} is not at its place")
            self.specs[int(rank.removeprefix("rank"))].append(spec)
            self._positions[path_in_file] = first + begin
        if first + end != path.stat().st_size:
            raise ValueError("the header does not describe the whole file")

    def digests(self) -> list[str]:
        """The digest of each rank's bytes."""
        found = []
        for rank in range(len(self.specs)):
            digest, reader = hashlib.sha256(), self.reader(rank)
            while len(piece := reader.read(PIECE_BYTES)):
                digest.update(piece.data)
            found.append(digest.hexdigest())
        return found

    def array(self, rank: int, name: str) -> np.ndarray:
        """One array of a rank."""
        _, shape, dtype = next(each for each in self.specs[rank] if each[0] == name)
        count, position = int(np.prod(shape, dtype=np.int64)), self._positions[f"rank{rank}/{name}"]
        return np.fromfile(self._path, dtype_of(dtype), count, offset=position).reshape(shape)

    def rows(self, rank: int, name: str, place: slice) -> np.ndarray:
        """Consecutive rows of one array of a rank."""
        _, shape, dtype = next(each for each in self.specs[rank] if each[0] == name)
        width, kind = int(np.prod(shape[1:], dtype=np.int64)), dtype_of(dtype)
        position = self._positions[f"rank{rank}/{name}"] + place.start * width * kind.itemsize
        count = place.stop - place.start
        return np.fromfile(self._path, kind, count * width, offset=position).reshape(count, *shape[1:])

    def mapped(self, rank: int, name: str) -> np.ndarray:
        """One array of a rank, which is read from the file where it is used."""
        _, shape, dtype = next(each for each in self.specs[rank] if each[0] == name)
        position = self._positions[f"rank{rank}/{name}"]
        return np.memmap(self._path, dtype_of(dtype), "r", offset=position, shape=tuple(shape))

    def reader(self, rank: int) -> "RankReader":
        """Reads the bytes of a rank's arrays, in order."""
        specs = self.specs[rank]
        begin = self._positions[f"rank{rank}/{specs[0][0]}"] if specs else 0
        return RankReader(self._path, begin, sum(map(num_bytes, specs)))


class RankReader:
    """Reads a part of a file in pieces."""

    def __init__(self, path: Path, begin: int, size: int):
        self._path = path
        self._position = begin
        self._end = begin + size

    def read(self, size: int) -> np.ndarray:
        """The next bytes, fewer at the end."""
        size = min(size, self._end - self._position)
        piece = np.fromfile(self._path, np.uint8, size, offset=self._position)
        if len(piece) < size:
            raise OSError(f"{self._path} has become shorter")
        self._position += size
        return piece
